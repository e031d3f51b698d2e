//! The public HTTP API: a stateless translation between HTTP and the scheduler's gRPC. No rule of the product lives here.
//!
//! Every operation is `POST /v1/<group.op>` with a JSON body. `GET /` and `GET /healthz` answer without a key.

mod artifact;
mod body;
mod cell;
mod cells;
mod failure;
pub mod limits;
mod ops;
mod render;
mod result;
mod runner;
mod server;
mod splice;

use std::{panic::AssertUnwindSafe, time::Instant};

use axum::{
    Json, Router,
    extract::Request,
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{any, get},
};
use futures::FutureExt as _;
use http::Method;
use serde_json::json;
use tokio::{net::TcpListener, sync::watch};

use crate::{cells::Cells, failure::Failure};

/// What the API needs to know.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// The cells that organizations live in; at least one.
    pub cells: Vec<CellAddresses>,
}

/// One cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellAddresses {
    /// For people: it stands in our log.
    pub name: String,
    /// Where each of its schedulers listens: `http://host:port`.
    pub schedulers: Vec<String>,
}

impl ApiOptions {
    /// For the only cell there is.
    pub fn one_cell(schedulers: Vec<String>) -> ApiOptions {
        let name = "default".to_owned();
        ApiOptions {
            cells: vec![CellAddresses { name, schedulers }],
        }
    }
}

/// Why the API could not serve.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The schedulers' addresses.
    #[error(transparent)]
    Address(#[from] evalgrid_discovery::AddressError),
    /// Two cells of one name.
    #[error("there are two cells of the name {0:?}; each needs a name of its own")]
    TwoCells(String),
    /// Not one.
    #[error("no cell is named")]
    NoCell,
}

/// Answers on `listener` until `shutdown` says true, then lets open requests finish within [`limits::SHUTDOWN_GRACE`]. Schedulers may
/// come and go: while none is the active one, requests get 503.
pub async fn serve(listener: TcpListener, o: ApiOptions, shutdown: watch::Receiver<bool>) -> Result<(), ApiError> {
    let cells = Cells::new(&o.cells)?;
    server::run(listener, router(ops::App::new(cells)), shutdown).await;
    Ok(())
}

fn router(app: ops::App) -> Router {
    Router::new()
        .route(
            "/",
            get(|| async { Json(json!({"name": "evalgrid", "version": env!("CARGO_PKG_VERSION")})) }),
        )
        .route("/healthz", get(|| async { Json(json!({"status": "ok"})) }))
        .route("/v1/{op}", any(ops::operation))
        .method_not_allowed_fallback(|| async { Failure::MethodNotAllowed })
        .fallback(|| async { Failure::NotFound("There is nothing at this path.".into()) })
        .layer(middleware::from_fn(observe))
        .with_state(app)
}

/// One line per request, and a whole answer even where a handler panics.
#[expect(clippy::disallowed_methods, reason = "an edge: the log tells how long requests take")]
async fn observe(request: Request, next: Next) -> Response {
    let started = Instant::now();
    let method = known_method(request.method());
    let path: String = request.uri().path().chars().take(100).collect();
    let response = match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(_) => {
            tracing::error!(method, ?path, "a handler panicked");
            Failure::Internal.into_response()
        }
    };
    let status = response.status().as_u16();
    let ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::info!(method, ?path, status, ms, "request");
    response
}

/// Methods are whatever the caller wrote; the log has only those it knows.
fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        Method::PATCH => "PATCH",
        _ => "OTHER",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::body::Body;
    use http_body_util::BodyExt as _;
    use tower::ServiceExt as _;

    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_internal_error() {
        async fn explode() -> &'static str {
            panic!("a secret of ours")
        }
        let router: Router = Router::new().route("/", get(explode)).layer(middleware::from_fn(observe));
        let response = router.oneshot(Request::get("/").body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), 500);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(
            serde_json::from_slice::<serde_json::Value>(&body).unwrap(),
            json!({"_tag": "InternalError", "message": "Something went wrong on our side."})
        );
    }
}
