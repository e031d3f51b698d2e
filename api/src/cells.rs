//! Which cell an organization lives in. The cells themselves say: the one that knows the caller's key is its home. What they said is
//! remembered for a while; a home that no longer knows the key is asked for anew, for organizations move.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use evalgrid_discovery::{another_may_answer, broke_off, never_began};
use evalgrid_proto::v1::WhoamiRequest;
use futures::{StreamExt as _, stream::FuturesUnordered};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout};
use tonic::{Code, Response, Status};

use crate::{
    ApiError, CellAddresses,
    cell::{Cell, call},
    failure::Failure,
    limits,
    ops::Caller,
};

/// All cells behind this API.
#[derive(Clone)]
pub(crate) struct Cells(Arc<Inner>);

struct Inner {
    cells: Vec<Cell>,
    homes: Mutex<Homes>,
}

impl Cells {
    pub(crate) fn new(options: &[CellAddresses]) -> Result<Cells, ApiError> {
        let mut cells = Vec::with_capacity(options.len());
        for cell in options {
            if options.iter().filter(|other| other.name == cell.name).count() > 1 {
                return Err(ApiError::TwoCells(cell.name.clone()));
            }
            cells.push(Cell::new(&cell.name, &cell.schedulers)?);
        }
        match cells.is_empty() {
            true => Err(ApiError::NoCell),
            false => Ok(Cells(Arc::new(Inner {
                cells,
                homes: Mutex::default(),
            }))),
        }
    }

    /// A call that changes nothing: made again where its scheduler was lost.
    pub(crate) async fn read<T, F>(&self, caller: &Caller, deadline: Duration, call: impl FnMut(&Cell) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        match timeout(deadline, self.sent(caller, another_may_answer, call)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(Failure::from_status(&status)),
            Err(_) => Err(Failure::from_status(&Status::deadline_exceeded("no answer in time"))),
        }
    }

    /// A call that changes something: made again only where it has certainly changed nothing yet.
    pub(crate) async fn write<T, F>(&self, caller: &Caller, deadline: Duration, call: impl FnMut(&Cell) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        match timeout(deadline, self.sent(caller, never_began, call)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) if broke_off(&status) && !never_began(&status) => {
                tracing::warn!(reason = status.message(), "the scheduler was lost in the middle of a change");
                Err(Failure::unknown_outcome())
            }
            Ok(Err(status)) => Err(Failure::from_status(&status)),
            Err(_) => Err(Failure::unknown_outcome()),
        }
    }

    /// As [`read`](Self::read), without a deadline, and with the answer as it came.
    pub(crate) async fn twice<T, F>(&self, caller: &Caller, call: impl FnMut(&Cell) -> F) -> Result<Response<T>, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.sent(caller, another_may_answer, call).await
    }

    async fn sent<T, F>(&self, caller: &Caller, again: fn(&Status) -> bool, mut call: impl FnMut(&Cell) -> F) -> Result<Response<T>, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let home = self.home(caller).await?;
        let answer = evalgrid_discovery::twice(&home.schedulers, again, || call(home)).await;
        match answer {
            // A home that does not know the key has done nothing, so even a change may be sent to where the organization lives now. One that
            // is down may have been left before.
            Err(status) if self.0.cells.len() > 1 && (status.code() == Code::Unauthenticated || again(&status)) => {
                self.homes().forget(&caller.fingerprint());
                let home = self.home(caller).await?;
                evalgrid_discovery::twice(&home.schedulers, again, || call(home)).await
            }
            answer => answer,
        }
    }

    /// The cell that knows the caller's key. Where there is only one, it is not asked.
    async fn home(&self, caller: &Caller) -> Result<&Cell, Status> {
        if let [only] = self.0.cells.as_slice() {
            return Ok(only);
        }
        let key = caller.fingerprint();
        let known = self.homes().find(&key, Instant::now());
        if let Some(cell) = known.and_then(|index| self.0.cells.get(index)) {
            return Ok(cell);
        }
        let mut asked: FuturesUnordered<_> = (0..self.0.cells.len()).map(|index| self.knows(index, caller)).collect();
        let mut silent = None;
        while let Some((index, answer)) = asked.next().await {
            match answer {
                Ok(()) => {
                    self.homes().remember(key, index, Instant::now());
                    return self.0.cells.get(index).ok_or_else(|| Status::internal("a cell that is not there"));
                }
                Err(status) if status.code() == Code::Unauthenticated => {}
                Err(status) => silent = Some(status),
            }
        }
        // A cell that cannot be asked may be the one: then nobody can say that the key is wrong.
        Err(silent.unwrap_or_else(|| Status::unauthenticated("this API key is not known, or was revoked")))
    }

    async fn knows(&self, index: usize, caller: &Caller) -> (usize, Result<(), Status>) {
        let Some(cell) = self.0.cells.get(index) else {
            return (index, Err(Status::internal("a cell that is not there")));
        };
        let whoami = call!(auth, whoami, caller.request(WhoamiRequest {}));
        let asked = evalgrid_discovery::twice(&cell.schedulers, another_may_answer, || whoami(cell));
        let answer = timeout(limits::HOME_DEADLINE, asked).await;
        let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")));
        if let Err(status) = &answer
            && status.code() != Code::Unauthenticated
        {
            tracing::warn!(
                cell = cell.name,
                reason = status.message(),
                "a cell cannot say whether it knows a key"
            );
        }
        let unreachable = |status: Status| match status.code() {
            Code::Unauthenticated => status,
            _ => Status::unavailable(format!("the cell {} does not answer", cell.name)),
        };
        (index, answer.map(drop).map_err(unreachable))
    }

    fn homes(&self) -> MutexGuard<'_, Homes> {
        self.0.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// SHA-256 of a key: what is remembered of it.
pub(crate) type Fingerprint = [u8; 32];

/// The fingerprint of what stands in `authorization`.
pub(crate) fn fingerprint(authorization: &[u8]) -> Fingerprint {
    Sha256::digest(authorization).into()
}

/// Where keys were known, the least recently used forgotten first.
#[derive(Default)]
struct Homes {
    known: HashMap<Fingerprint, Home>,
    uses: u64,
}

struct Home {
    cell: usize,
    until: Instant,
    last_use: u64,
}

impl Homes {
    fn find(&mut self, key: &Fingerprint, now: Instant) -> Option<usize> {
        self.uses += 1;
        let home = self.known.get_mut(key).filter(|home| now < home.until)?;
        home.last_use = self.uses;
        Some(home.cell)
    }

    fn remember(&mut self, key: Fingerprint, cell: usize, now: Instant) {
        if self.known.len() >= limits::HOMES {
            self.make_room(now);
        }
        self.uses += 1;
        let home = Home {
            cell,
            until: now + limits::HOME_TTL,
            last_use: self.uses,
        };
        self.known.insert(key, home);
    }

    fn forget(&mut self, key: &Fingerprint) {
        self.known.remove(key);
    }

    /// A quarter at once, so that looking for the oldest is paid for by many.
    fn make_room(&mut self, now: Instant) {
        self.known.retain(|_, home| now < home.until);
        let mut uses: Vec<u64> = self.known.values().map(|home| home.last_use).collect();
        let keep = limits::HOMES - limits::HOMES / 4;
        if uses.len() > keep {
            let drop = uses.len() - keep;
            let (_, oldest_kept, _) = uses.select_nth_unstable(drop);
            let oldest_kept = *oldest_kept;
            self.known.retain(|_, home| home.last_use >= oldest_kept);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_are_bounded_and_end() {
        let mut homes = Homes::default();
        let now = Instant::now();
        let key = |number: usize| fingerprint(&number.to_le_bytes());
        for number in 0..limits::HOMES + 1 {
            homes.remember(key(number), number % 2, now);
            assert!(homes.known.len() <= limits::HOMES);
            assert_eq!(homes.find(&key(0), now), Some(0), "what is used stays");
        }
        assert_eq!(homes.find(&key(1), now), None, "what is not goes");
        assert_eq!(homes.find(&key(limits::HOMES), now), Some(limits::HOMES % 2));
        homes.forget(&key(0));
        assert_eq!(homes.find(&key(0), now), None);
        assert_eq!(homes.find(&key(limits::HOMES), now + limits::HOME_TTL), None);
    }
}
