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
    /// The log of the open door's term takes nothing.
    stalled: watch::Sender<bool>,
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
        let gate = Gate {
            door,
            stalled: watch::Sender::new(false),
            health,
        };
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
        self.stalled.send_replace(false);
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

    /// While the log takes nothing, nothing can be answered: new calls are refused, and those that wait are told that they wait in vain.
    pub async fn stall(&self, stalled: bool) {
        self.stalled.send_replace(stalled);
        self.tell(match stalled {
            true => ServingStatus::NotServing,
            false => ServingStatus::Serving,
        })
        .await;
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
        let mut stalled = self.stalled.subscribe();
        let services = match self.door.borrow().clone() {
            Door::Open(services) => services,
            Door::Closed(active) => return untouched("this scheduler is a standby; ask the active one of its cell", active),
        };
        if *stalled.borrow() {
            return untouched(
                "the scheduler's log takes nothing at the moment, so nothing was done; try again later",
                None,
            );
        }
        tokio::select! {
            Ok(response) = services.oneshot(request) => response,
            _ = stalled.wait_for(|stalled| *stalled) => refusal(Status::unavailable(
                "the scheduler's log takes nothing at the moment; whether this was done is not known: try again later, with the same idempotency key",
            )),
        }
    }
}

/// Nothing was done.
fn untouched(why: &str, active: Option<String>) -> Response {
    let mut status = Status::unavailable(why);
    let active = active.and_then(|address| address.parse().ok());
    status
        .metadata_mut()
        .insert(ACTIVE, active.unwrap_or(MetadataValue::from_static("")));
    refusal(status)
}

fn refusal(status: Status) -> Response {
    let (parts, ()) = status.into_http::<()>().into_parts();
    Response::from_parts(parts, axum::body::Body::new(Body::empty()))
}
