//! The front door: answers for health itself, lets calls through to the services while this scheduler is the active one of its cell, and
//! otherwise says so. A standby never answers from what it happens to know.

use axum::{Router, extract::Request, response::Response};
use evalgrid_proto::v1::{batches_server::BatchesServer, workers_server::WorkersServer};
use tokio::sync::watch;
use tonic::{Status, body::Body, metadata::MetadataValue, service::Routes};
use tonic_health::{ServingStatus, server::HealthReporter};
use tower::ServiceExt as _;

use crate::{ServeError, clients::ClientsService, workers::WorkersService};

/// Says where the active scheduler is; empty where a standby does not know. Its presence tells callers that nothing was done.
const ACTIVE: &str = "evalgrid-active";

/// Whether calls are let through, and to what.
#[derive(Clone)]
pub struct Gate {
    door: watch::Sender<Door>,
    health: HealthReporter,
}

#[derive(Clone)]
enum Door {
    /// To this term's services.
    Open(Router),
    /// The address of the active scheduler, if it is known.
    Closed(Option<String>),
}

impl Gate {
    /// A closed gate, and what the server serves.
    pub async fn new() -> Result<(Gate, Routes), ServeError> {
        let (health, health_service) = tonic_health::server::health_reporter();
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(evalgrid_proto::DESCRIPTORS)
            .build_v1()?;
        let (door, _) = watch::channel(Door::Closed(None));
        let gate = Gate { door, health };
        gate.tell(ServingStatus::NotServing).await;
        let through = gate.clone();
        let router = Routes::new(health_service)
            .add_service(reflection)
            .into_axum_router()
            .fallback(move |request| through.clone().pass(request));
        Ok((gate, router.into()))
    }

    /// Lets calls through.
    pub async fn open(&self, services: Routes) {
        self.door.send_replace(Door::Open(services.prepare().into_axum_router()));
        self.tell(ServingStatus::Serving).await;
    }

    /// Lets none through, and points to the active scheduler.
    pub async fn close(&self, active: Option<String>) {
        self.door.send_replace(Door::Closed(active));
        self.tell(ServingStatus::NotServing).await;
    }

    /// Learns where the active scheduler is, while this one is not.
    pub fn point_to(&self, active: Option<String>) {
        self.door.send_if_modified(|door| match door {
            Door::Closed(known) if *known != active => {
                *known = active;
                true
            }
            _ => false,
        });
    }

    async fn tell(&self, status: ServingStatus) {
        self.health.set_service_status("", status).await;
        let names = [
            <BatchesServer<ClientsService> as tonic::server::NamedService>::NAME,
            <WorkersServer<WorkersService> as tonic::server::NamedService>::NAME,
        ];
        for name in names {
            self.health.set_service_status(name, status).await;
        }
    }

    async fn pass(self, request: Request) -> Response {
        let door = self.door.borrow().clone();
        match door {
            Door::Open(services) => match services.oneshot(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            },
            Door::Closed(active) => {
                let mut status = Status::unavailable("this scheduler is a standby; ask the active one of its cell");
                let active = active.and_then(|address| address.parse().ok());
                status
                    .metadata_mut()
                    .insert(ACTIVE, active.unwrap_or(MetadataValue::from_static("")));
                let (parts, ()) = status.into_http::<()>().into_parts();
                Response::from_parts(parts, axum::body::Body::new(Body::empty()))
            }
        }
    }
}
