//! Creations that are never cut off in their middle. Whoever waits for a sandbox may be gone before it is there, for example because its trial was
//! cancelled; the sandbox comes into being all the same. So it is listed from the first moment on, and destroyed only once it is there: a destruction
//! that found nothing yet would be reported, and the sandbox would be on nobody's list.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use evalgrid_sandbox::{BaseSupport, Sandbox, SandboxError, SandboxName, SandboxProvider, SandboxSpec};
use tokio::sync::watch;
use tracing::Instrument as _;

/// A provider, with creations that go on when their futures are dropped.
pub(crate) struct Whole {
    inner: Arc<dyn SandboxProvider>,
    creating: Arc<Creating>,
}

/// The sandboxes that are being created. Each entry's sender is held by its creation, and is gone when that has ended.
type Creating = Mutex<BTreeMap<SandboxName, watch::Receiver<()>>>;

impl Whole {
    pub(crate) fn new(inner: impl SandboxProvider + 'static) -> Self {
        Self {
            inner: Arc::new(inner),
            creating: Arc::default(),
        }
    }

    /// Returns when no sandbox of this name is being created. Creations have deadlines of their own.
    async fn created(&self, name: &str) {
        let creation = locked(&self.creating).get(name).cloned();
        if let Some(mut creation) = creation {
            // An error says that the sender is gone, which is what we wait for.
            let _ = creation.changed().await;
        }
    }
}

/// A creation, until it is dropped.
struct Creation {
    creating: Arc<Creating>,
    name: SandboxName,
    _ended: watch::Sender<()>,
}

impl Drop for Creation {
    fn drop(&mut self) {
        locked(&self.creating).remove(&self.name);
    }
}

#[async_trait]
impl SandboxProvider for Whole {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let (sender, receiver) = watch::channel(());
        let creation = Creation {
            creating: self.creating.clone(),
            name: spec.name.clone(),
            _ended: sender,
        };
        // A name is created once: it has the token of its lease in it.
        locked(&self.creating).insert(spec.name.clone(), receiver);
        let (inner, spec) = (self.inner.clone(), spec.clone());
        let create = async move {
            let _creation = creation;
            inner.create(&spec).await
        };
        let created = tokio::spawn(create.in_current_span()).await;
        created.unwrap_or_else(|error| {
            Err(SandboxError::Create {
                provider: self.name(),
                reason: error.to_string(),
            })
        })
    }

    async fn attach(&self, name: &str, token: u64) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.created(name).await;
        self.inner.attach(name, token).await
    }

    async fn list(&self) -> Result<Vec<SandboxName>, SandboxError> {
        // Before the others are: one that comes into being meanwhile is on one of the two.
        let mut names: BTreeSet<SandboxName> = locked(&self.creating).keys().cloned().collect();
        names.extend(self.inner.list().await?);
        Ok(names.into_iter().collect())
    }

    fn share(&self, files: &[(String, Vec<u8>)]) -> Result<(), SandboxError> {
        self.inner.share(files)
    }

    fn bases(&self) -> Option<BaseSupport> {
        self.inner.bases()
    }

    fn bases_in_use(&self) -> Result<BTreeSet<PathBuf>, SandboxError> {
        self.inner.bases_in_use()
    }

    async fn destroy(&self, name: &str) -> Result<(), SandboxError> {
        self.created(name).await;
        self.inner.destroy(name).await
    }
}

fn locked(creating: &Creating) -> MutexGuard<'_, BTreeMap<SandboxName, watch::Receiver<()>>> {
    creating.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::FutureExt as _;
    use tokio::sync::Notify;

    use super::*;

    /// Has a sandbox once it is allowed to.
    #[derive(Clone, Default)]
    struct Slow {
        asked: Arc<Notify>,
        allowed: Arc<Notify>,
        there: Arc<Mutex<BTreeSet<SandboxName>>>,
    }

    #[async_trait]
    impl SandboxProvider for Slow {
        fn name(&self) -> &'static str {
            "process"
        }
        async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
            self.asked.notify_one();
            self.allowed.notified().await;
            self.there.lock().unwrap().insert(spec.name.clone());
            self.attach(&spec.name, spec.token).await
        }
        async fn attach(&self, name: &str, _: u64) -> Result<Box<dyn Sandbox>, SandboxError> {
            let reason = self.there.lock().unwrap().contains(name).to_string();
            Err(SandboxError::Lost { name: name.into(), reason })
        }
        async fn list(&self) -> Result<Vec<SandboxName>, SandboxError> {
            Ok(self.there.lock().unwrap().iter().cloned().collect())
        }
        fn share(&self, _: &[(String, Vec<u8>)]) -> Result<(), SandboxError> {
            Ok(())
        }
        async fn destroy(&self, name: &str) -> Result<(), SandboxError> {
            self.there.lock().unwrap().remove(name);
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_creation_that_nobody_waits_for_is_destroyed_once_it_has_ended() {
        let slow = Slow::default();
        let whole = Whole::new(slow.clone());
        let spec = SandboxSpec {
            name: "trial_1".into(),
            token: 1,
            lifetime: std::time::Duration::from_secs(1),
            limits: evalgrid_sandbox::Limits {
                memory_bytes: 1 << 30,
                pids: 100,
            },
            base: None,
        };
        tokio::select! {
            biased;
            _ = whole.create(&spec) => panic!("it waits to be allowed"),
            () = slow.asked.notified() => {}
        }
        // Its future is gone, and it is on the list.
        assert_eq!(whole.list().await.unwrap(), ["trial_1"]);
        // Another's end waits for nothing.
        whole.destroy("trial_2").await.unwrap();
        let mut end = whole.destroy("trial_1");
        assert!((&mut end).now_or_never().is_none(), "there is nothing to be destroyed yet");
        let mut attached = whole.attach("trial_1", 2);
        assert!((&mut attached).now_or_never().is_none(), "nor to be attached to");
        slow.allowed.notify_one();
        assert!(
            attached.await.is_err_and(|error| error.to_string().contains("true")),
            "it was there by then"
        );
        end.await.unwrap();
        assert!(whole.list().await.unwrap().is_empty());
    }
}
