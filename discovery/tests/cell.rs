//! A cell of small schedulers that die, change roles, lie and say nothing, and callers that must end up at the active one.
#![allow(clippy::unwrap_used)]

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use evalgrid_discovery::{AddressError, PATIENCE, Routed, Schedulers, another_may_answer, broke_off, never_began, twice};
use evalgrid_proto::v1::{
    Identity, WhoamiRequest,
    auth_client::AuthClient,
    auth_server::{Auth, AuthServer},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    runtime::Runtime,
    time::{Instant, sleep},
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Request, Response, Status};
use tonic_health::{ServingStatus, server::HealthReporter};

/// What the machine may add to what is measured, busy as it is.
const SLACK: Duration = Duration::from_millis(1500);
/// The pause between two looks, and the time of some answers.
const FOUND: Duration = Duration::from_millis(300);

/// What a scheduler does with calls.
#[derive(Clone)]
enum Role {
    Active,
    /// With where it believes the active one to be.
    Standby(String),
    /// Takes the call and never answers.
    Stuck,
}

#[derive(Clone)]
struct Service {
    name: &'static str,
    role: Arc<Mutex<Role>>,
    calls: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl Auth for Service {
    async fn whoami(&self, _: Request<WhoamiRequest>) -> Result<Response<Identity>, Status> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let role = self.role.lock().unwrap().clone();
        match role {
            Role::Active => Ok(Response::new(Identity {
                organization_name: self.name.into(),
                ..Identity::default()
            })),
            Role::Standby(active) => {
                let mut status = Status::unavailable("a standby");
                status.metadata_mut().insert("evalgrid-active", active.parse().unwrap());
                Err(status)
            }
            Role::Stuck => std::future::pending().await,
        }
    }
}

/// One on a runtime of its own, which takes its connections along when it dies.
struct Fake {
    address: SocketAddr,
    service: Service,
    health: HealthReporter,
    runtime: Option<Runtime>,
}

impl Fake {
    fn new(name: &'static str, role: Role) -> Fake {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (health, health_service) = tonic_health::server::health_reporter();
        let service = Service {
            name,
            role: Arc::new(Mutex::new(role)),
            calls: Arc::default(),
        };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder()
            .add_service(health_service)
            .add_service(AuthServer::new(service.clone()));
        runtime.spawn(async move {
            let incoming = TcpListenerStream::new(TcpListener::from_std(listener).unwrap());
            server.serve_with_incoming(incoming).await.unwrap();
        });
        Fake {
            address,
            service,
            health,
            runtime: Some(runtime),
        }
    }

    async fn active(name: &'static str) -> Fake {
        let fake = Fake::new(name, Role::Active);
        fake.become_(Role::Active).await;
        fake
    }

    async fn standby(name: &'static str) -> Fake {
        let fake = Fake::new(name, Role::Active);
        fake.become_(Role::Standby(String::new())).await;
        fake
    }

    async fn become_(&self, role: Role) {
        let status = match role {
            Role::Standby(_) => ServingStatus::NotServing,
            Role::Active | Role::Stuck => ServingStatus::Serving,
        };
        *self.service.role.lock().unwrap() = role;
        self.health.set_service_status("", status).await;
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn calls(&self) -> usize {
        self.service.calls.load(Ordering::SeqCst)
    }

    /// Stops it as SIGSTOP does: its connections stay, and nothing comes over them until what this returns is dropped.
    fn freeze(&self) -> std::sync::mpsc::Sender<()> {
        let (thaw, frozen) = std::sync::mpsc::channel();
        // It has one thread only.
        self.runtime.as_ref().unwrap().spawn(async move { frozen.recv() });
        thaw
    }

    fn die(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn cell(addresses: &[String]) -> Schedulers {
    Schedulers::new(addresses, |endpoint| endpoint.connect_timeout(Duration::from_secs(5))).unwrap()
}

/// Who answered a call that may be repeated where `again` says so.
async fn ask(schedulers: &Schedulers, again: fn(&Status) -> bool) -> Result<String, Status> {
    let client = AuthClient::new(Routed::new(schedulers.clone()));
    let answer = twice(schedulers, again, || {
        let mut client = client.clone();
        async move { client.whoami(WhoamiRequest {}).await }
    });
    answer.await.map(|answer| answer.into_inner().organization_name)
}

async fn read(schedulers: &Schedulers) -> String {
    ask(schedulers, another_may_answer).await.unwrap()
}

fn took(since: Instant, at_most: Duration, what: &str) {
    let took = since.elapsed();
    assert!(took <= at_most + SLACK, "{what} took {took:?}");
    println!("{what}: {took:?}");
}

#[tokio::test]
async fn the_one_that_serves_is_found_wherever_it_stands() {
    for place in 0..3 {
        let mut fakes = Vec::new();
        for index in 0..3 {
            fakes.push(match index == place {
                true => Fake::active("active").await,
                false => Fake::standby("standby").await,
            });
        }
        let schedulers = cell(&fakes.iter().map(Fake::url).collect::<Vec<_>>());
        let began = Instant::now();
        for _ in 0..3 {
            assert_eq!(read(&schedulers).await, "active");
        }
        took(began, Duration::ZERO, "three calls");
        let calls: Vec<_> = fakes.iter().map(Fake::calls).collect();
        assert_eq!((calls[place], calls.iter().sum::<usize>()), (3, 3), "no standby was bothered");
    }
}

/// catalogue 5: who serves is asked, not remembered.
#[tokio::test]
async fn a_failover_is_followed() {
    let (mut a, b) = (Fake::active("a").await, Fake::standby("b").await);
    let schedulers = cell(&[a.url(), b.url()]);
    assert_eq!(read(&schedulers).await, "a");
    a.die();
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let schedulers = schedulers.clone();
            tokio::spawn(async move { read(&schedulers).await })
        })
        .collect();
    sleep(Duration::from_millis(700)).await;
    b.become_(Role::Active).await;
    let began = Instant::now();
    for call in waiting {
        assert_eq!(call.await.unwrap(), "b");
    }
    took(began, FOUND, "finding the new one");
    assert_eq!(b.calls(), 20, "each call was made once, and none of them too early");
}

#[tokio::test]
async fn a_call_to_a_frozen_scheduler_ends_when_another_one_serves() {
    let (a, b) = (Fake::active("a").await, Fake::standby("b").await);
    let schedulers = cell(&[a.url(), b.url()]);
    assert_eq!(read(&schedulers).await, "a");
    let thaw = a.freeze();
    let call = |again: fn(&Status) -> bool| {
        let schedulers = schedulers.clone();
        tokio::spawn(async move { ask(&schedulers, again).await })
    };
    let (reads, write) = ([call(another_may_answer), call(another_may_answer)], call(never_began));
    // The failover; nobody else serves until then, and the calls wait.
    sleep(Duration::from_secs(1)).await;
    b.become_(Role::Active).await;
    let began = Instant::now();
    for read in reads {
        assert_eq!(read.await.unwrap().unwrap(), "b");
    }
    let status = write.await.unwrap().unwrap_err();
    assert!(broke_off(&status) && !never_began(&status), "{status:?}");
    assert!(began.elapsed() < PATIENCE + SLACK, "{:?}", began.elapsed());
    drop(thaw);
}

#[tokio::test]
async fn a_slow_call_to_the_active_scheduler_is_waited_for() {
    let (a, b) = (Fake::active("a").await, Fake::standby("b").await);
    let schedulers = cell(&[a.url(), b.url()]);
    assert_eq!(read(&schedulers).await, "a");
    let thaw = a.freeze();
    let answer = async { read(&schedulers).await };
    let (answer, ()) = tokio::join!(answer, async {
        sleep(Duration::from_millis(3500)).await;
        drop(thaw);
    });
    assert_eq!((answer.as_str(), b.calls()), ("a", 0));
}

#[tokio::test]
async fn a_write_is_repeated_where_it_never_began_only() {
    let (mut a, b) = (Fake::active("a").await, Fake::standby("b").await);
    let schedulers = cell(&[a.url(), b.url()]);
    assert_eq!(read(&schedulers).await, "a");
    // Refused by the old one, which has become a standby.
    a.become_(Role::Standby(String::new())).await;
    b.become_(Role::Active).await;
    assert_eq!(ask(&schedulers, never_began).await.unwrap(), "b");
    assert_eq!((a.calls(), b.calls()), (2, 1));

    // Broken off in the middle.
    a.become_(Role::Stuck).await;
    b.become_(Role::Standby(String::new())).await;
    let call = {
        let schedulers = schedulers.clone();
        tokio::spawn(async move { ask(&schedulers, never_began).await })
    };
    while a.calls() < 3 {
        sleep(Duration::from_millis(5)).await;
    }
    b.become_(Role::Active).await;
    a.die();
    let status = call.await.unwrap().unwrap_err();
    assert!(broke_off(&status) && !never_began(&status), "{status:?}");
    assert_eq!(b.calls(), 2, "one before, one refused");

    // No connection could be made.
    assert_eq!(ask(&schedulers, never_began).await.unwrap(), "b");
    let mut c = Fake::active("c").await;
    let schedulers = cell(&[c.url(), b.url()]);
    b.become_(Role::Standby(String::new())).await;
    assert_eq!(read(&schedulers).await, "c");
    c.die();
    b.become_(Role::Active).await;
    assert_eq!(read(&schedulers).await, "b");
}

#[tokio::test]
async fn a_hint_to_a_stranger_is_ignored() {
    let stranger = Fake::active("stranger").await;
    let (a, b) = (Fake::active("a").await, Fake::standby("b").await);
    let schedulers = cell(&[a.url(), b.url()]);
    assert_eq!(read(&schedulers).await, "a");
    a.become_(Role::Standby(stranger.url())).await;
    b.become_(Role::Active).await;
    assert_eq!(read(&schedulers).await, "b");
    assert_eq!(stranger.calls(), 0);
}

/// catalogue 52: an answer that never comes has a deadline.
#[tokio::test]
async fn one_that_says_nothing_keeps_nobody_waiting() {
    let hole = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", hole.local_addr().unwrap());
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((mut stream, _)) = hole.accept().await {
            held.push(tokio::spawn(async move {
                let mut bytes = [0; 1024];
                while stream.read(&mut bytes).await.is_ok_and(|count| count > 0) {}
            }));
        }
    });
    let b = Fake::standby("b").await;
    let schedulers = cell(&[url, b.url()]);
    let call = {
        let schedulers = schedulers.clone();
        tokio::spawn(async move { read(&schedulers).await })
    };
    sleep(Duration::from_millis(1500)).await;
    b.become_(Role::Active).await;
    let began = Instant::now();
    assert_eq!(call.await.unwrap(), "b");
    took(began, FOUND, "finding one beside a silent one");
}

#[tokio::test]
async fn without_an_active_one_the_caller_learns_why() {
    let (a, mut b) = (Fake::standby("a").await, Fake::standby("b").await);
    b.die();
    let schedulers = cell(&[a.url(), b.url()]);
    let began = Instant::now();
    let status = ask(&schedulers, |_| false).await.unwrap_err();
    assert!(began.elapsed() >= PATIENCE);
    took(began, PATIENCE, "giving up");
    assert_eq!(status.code(), Code::Unavailable);
    for words in [format!("{} is a standby", a.url()), format!("{} cannot be reached", b.url())] {
        assert!(status.message().contains(&words), "{}", status.message());
    }
    // Who comes later is not kept from finding one.
    a.become_(Role::Active).await;
    assert_eq!(read(&schedulers).await, "a");
}

#[tokio::test]
async fn the_only_one_is_never_looked_for() {
    let a = Fake::standby("a").await;
    let schedulers = cell(&[a.url(), a.url()]);
    assert!(!schedulers.are_several());
    let began = Instant::now();
    let status = ask(&schedulers, |_| true).await.unwrap_err();
    assert_eq!(
        (status.code(), a.calls()),
        (Code::Unavailable, 1),
        "asked once, and not asked whether it serves"
    );
    took(began, Duration::ZERO, "its answer");
}

#[tokio::test]
async fn addresses_are_checked() {
    fn check(addresses: &[&str], expected: Result<usize, AddressError>) {
        let got = Schedulers::new(addresses, |endpoint| endpoint);
        assert_eq!(got.map(|schedulers| schedulers.addresses().count()), expected, "{addresses:?}");
    }
    let invalid = |address: &str| Err(AddressError::Invalid(address.into()));
    check(&["http://a:1", " http://b:2 ", "http://a:1"], Ok(2));
    check(&[], Err(AddressError::None));
    check(&["http://a:1", ""], invalid(""));
    check(&["https://a:1"], invalid("https://a:1"));
    check(&["a:1"], invalid("a:1"));
    check(&["/socket"], invalid("/socket"));
    let many: Vec<_> = (0..17).map(|port| format!("http://a:{port}")).collect();
    check(&many.iter().map(String::as_str).collect::<Vec<_>>(), Err(AddressError::TooMany(17)));
}

/// Stands between a client and `to`, and counts the pings that the client sends of its own accord.
async fn pings_through(to: SocketAddr, pings: Arc<AtomicUsize>) -> SocketAddr {
    const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let server = tokio::net::TcpStream::connect(to).await.unwrap();
        let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client.into_split(), server.into_split());
        tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
        let mut preface = [0; PREFACE];
        from_client.read_exact(&mut preface).await.unwrap();
        to_server.write_all(&preface).await.unwrap();
        loop {
            // Length, kind, flags, stream: nine bytes before each frame. A ping is of kind 6, an answer to one has flag 1.
            let mut head = [0; 9];
            if from_client.read_exact(&mut head).await.is_err() {
                return;
            }
            let mut rest = vec![0; usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])];
            from_client.read_exact(&mut rest).await.unwrap();
            if head[3] == 6 && head[4] & 1 == 0 {
                pings.fetch_add(1, Ordering::SeqCst);
            }
            to_server.write_all(&[&head[..], &rest].concat()).await.unwrap();
        }
    });
    address
}

/// catalogue 55: whoever speaks to a scheduler asks a quiet connection whether it still lives, also while no call is open.
#[tokio::test]
async fn a_quiet_connection_is_asked_whether_it_lives() {
    let active = Fake::active("active").await;
    let pings = Arc::new(AtomicUsize::new(0));
    let address = pings_through(active.address, pings.clone()).await;
    // The caller tunes something else, and cannot leave this out.
    let schedulers = Schedulers::new(&[format!("http://{address}")], |endpoint| endpoint.tcp_nodelay(true)).unwrap();
    AuthClient::new(Routed::new(schedulers.clone()))
        .whoami(WhoamiRequest {})
        .await
        .unwrap();
    // hyper measures the window with pings of its own while there is traffic; from here on there is none.
    sleep(Duration::from_millis(300)).await;
    let before = pings.load(Ordering::SeqCst);
    let asked = async {
        while pings.load(Ordering::SeqCst) == before {
            sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(15), asked).await.unwrap();
}
