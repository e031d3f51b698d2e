//! The listener: connections, their limits, and a shutdown with an end.

use std::{convert::Infallible, sync::Arc};

use axum::{body::Body, extract::Request, response::Response};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{sleep, timeout},
};
use tower::{Service, ServiceExt as _};

use crate::limits;

/// Serves `service` on `listener` until `shutdown` says true (or its sender is gone), then lets open requests finish for a while.
pub(crate) async fn run<S>(listener: TcpListener, service: S, mut shutdown: watch::Receiver<bool>)
where
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits::HEADER_DEADLINE)
        .keep_alive(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(limits::KEEP_ALIVE)
        .max_concurrent_streams(limits::STREAMS_PER_CONNECTION);
    let builder = Arc::new(builder);
    let places = Arc::new(Semaphore::new(limits::CONNECTIONS));
    let graceful = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            _ = shutdown.wait_for(|stop| *stop) => break,
        };
        let (stream, place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                sleep(limits::ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Small answers must not wait for the other side's delayed acknowledgement; without it they are only slower.
        let _ = stream.set_nodelay(true);
        let service = service
            .clone()
            .map_request(|request: http::Request<Incoming>| request.map(Body::new));
        let connection = builder
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
            .into_owned();
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(place);
        });
    }
    drop(listener);
    if timeout(limits::SHUTDOWN_GRACE, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests were still open at the end of the shutdown's grace");
    }
}

async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, place))
}
