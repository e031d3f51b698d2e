//! A standby: follows the log of its cell, so that its state is warm, and takes over as soon as nobody holds the lease.

use std::{sync::Arc, thread, time::Duration};

use evalgrid_store::{
    Index as _, LogError, SledIndex,
    redis::{Follower, RedisOptions, RedisStore, RedisUrl},
};
use tokio::sync::watch;

use crate::{
    OpenError,
    engine::{OnLogFailure, Tenure},
    gate::Gate,
    replica::{FetchPart, Replica},
    term::Ground,
};

/// Between two looks at the log: a takeover waits for one of them, and each costs Redis a page.
const LOOK: Duration = Duration::from_millis(100);
/// Between two tries while Redis cannot be reached.
const RETRY: Duration = Duration::from_millis(250);
/// Tokens of one epoch.
const EPOCH_BITS: u32 = 40;
/// Tokens of one owner: far more than a failover can take away.
const OWNER_BITS: u32 = 20;

/// The token above which an owner gives out its own. A failover can take an epoch back, and with it all knowledge of the tokens that were given out
/// in it; then another owner gets the same epoch. So chance has a part in it: what one has given out, the other does not.
pub fn token_floor(epoch: u64, chance: u64) -> u64 {
    let owner = chance >> (u64::BITS - (EPOCH_BITS - OWNER_BITS));
    (epoch << EPOCH_BITS) | (owner << OWNER_BITS)
}

/// Where a cell's log is.
#[derive(Clone, Debug)]
pub struct CellOptions {
    /// Its Redis.
    pub url: RedisUrl,
    /// The cell's name: several can share a Redis.
    pub cell: String,
    /// What is asked of the Redis.
    pub redis: RedisOptions,
    /// How others reach this scheduler.
    pub advertise: String,
}

/// A cell that this process can be the active scheduler of.
pub struct Cell {
    store: RedisStore,
    advertise: String,
}

struct Held(evalgrid_store::redis::Tenure);

#[async_trait::async_trait]
impl Tenure for Held {
    fn holds(&self) -> bool {
        self.0.holds()
    }

    async fn lost(&self) {
        let _ = self.0.lost().wait_for(Option::is_some).await;
    }

    fn release(&self) {
        if let Err(error) = self.0.release() {
            tracing::warn!("the cell could not be handed over, so it is free once the lease runs out: {error}");
        }
    }
}

impl Cell {
    /// Connects, and refuses a Redis that does not keep what it acknowledges. Blocking.
    pub fn connect(options: CellOptions) -> Result<Cell, OpenError> {
        let store = RedisStore::connect(options.url, &options.cell, options.redis)?;
        tracing::info!("{}", store.durability());
        Ok(Cell {
            store,
            advertise: options.advertise,
        })
    }

    /// What the Redis keeps, for people.
    pub fn durability(&self) -> String {
        self.store.durability().to_string()
    }

    /// Follows until this process is the active one; None at shutdown. Blocking.
    pub fn follow(
        &self,
        index: &Arc<SledIndex>,
        fetch: &FetchPart,
        gate: &Gate,
        shutdown: &watch::Receiver<bool>,
    ) -> Result<Option<Ground>, OpenError> {
        let mut follower = self.store.follow();
        let mut replica = Replica::new(index.clone(), fetch.clone())?;
        tracing::info!("following the cell's log as a standby");
        let mut unreachable = false;
        while !*shutdown.borrow() {
            match self.look(&mut follower, &mut replica, index, gate) {
                Ok(Look::Taken(ground)) => return Ok(Some(*ground)),
                Ok(Look::Lost) => replica = Replica::new(index.clone(), fetch.clone())?,
                Ok(Look::Following) => {
                    unreachable = false;
                    thread::sleep(LOOK);
                }
                Err(OpenError::Log(LogError::Redis(error))) if error.passes() => {
                    if !std::mem::replace(&mut unreachable, true) {
                        tracing::warn!("Redis cannot be used now, trying on: {error}");
                    }
                    thread::sleep(RETRY);
                }
                // Somebody else was faster.
                Err(OpenError::Log(LogError::Fenced { .. } | LogError::Unknown { .. })) => {
                    follower = self.store.follow();
                    replica = Replica::new(index.clone(), fetch.clone())?;
                    thread::sleep(RETRY);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn look(&self, follower: &mut Follower, replica: &mut Replica, index: &SledIndex, gate: &Gate) -> Result<Look, OpenError> {
        let followed = follower.poll(|item| replica.take(item))?;
        if let Some(loss) = followed.loss {
            tracing::error!(
                from = loss.from,
                to = loss.to,
                "a failover of Redis has lost records that may have been acknowledged; what they said did not happen"
            );
            index.reset("")?;
            return Ok(Look::Lost);
        }
        replica.flush()?;
        gate.point_to(followed.owner.filter(|_| !followed.free).map(|owner| owner.address));
        if !followed.free {
            return Ok(Look::Following);
        }
        let Some((log, tenure)) = follower.take(&self.advertise, |item| replica.take(item))? else {
            return Ok(Look::Following);
        };
        replica.claim_index(&log.history()).map_err(OpenError::Archive)?;
        let mut core = replica.to_core()?;
        core.state.raise_token_floor(token_floor(tenure.epoch(), rand::random()));
        tracing::info!(
            epoch = tenure.epoch(),
            position = core.position(),
            "this is the active scheduler of the cell now"
        );
        Ok(Look::Taken(Box::new(Ground {
            core,
            log: Box::new(log),
            tenure: Arc::new(Held(tenure)),
            on_failure: OnLogFailure::StepDown,
        })))
    }
}

enum Look {
    Following,
    /// A part of the log was lost: all is read anew.
    Lost,
    Taken(Box<Ground>),
}
