//! An index whose rows may be gone after a crash, back to where it was synced last.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use evalgrid_store::{Index, IndexError, KeyValue, Row};

/// See the module.
#[derive(Default)]
pub struct Rows {
    state: Mutex<State>,
}

#[derive(Clone, Default)]
struct Table {
    rows: BTreeMap<Vec<u8>, Vec<u8>>,
    position: u64,
    origin: Option<String>,
}

#[derive(Default)]
struct State {
    now: Table,
    synced: Table,
}

impl Rows {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A crash takes what was not synced; true if that was anything.
    pub fn crash(&self) -> bool {
        let mut state = self.state();
        let behind = state.now.position > state.synced.position;
        state.now = state.synced.clone();
        behind
    }
}

impl Index for Rows {
    fn apply(&self, position: u64, rows: &[Row]) -> Result<(), IndexError> {
        let mut state = self.state();
        let reflected = state.now.position;
        if position <= reflected {
            return Err(IndexError::Stale { position, reflected });
        }
        for (key, value) in rows {
            match value {
                Some(value) => state.now.rows.insert(key.clone(), value.clone()),
                None => state.now.rows.remove(key),
            };
        }
        state.now.position = position;
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        Ok(self.state().now.rows.get(key).cloned())
    }

    fn scan(&self, prefix: &[u8], after: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, IndexError> {
        let state = self.state();
        let rows = state.now.rows.iter().filter(|(key, _)| key.starts_with(prefix));
        let behind = rows.filter(|(key, _)| after.is_none_or(|after| key.as_slice() > after));
        Ok(behind.take(limit).map(|(key, value)| (key.clone(), value.clone())).collect())
    }

    fn position(&self) -> Result<u64, IndexError> {
        Ok(self.state().now.position)
    }

    fn origin(&self) -> Result<Option<String>, IndexError> {
        Ok(self.state().now.origin.clone())
    }

    fn reset(&self, origin: &str) -> Result<(), IndexError> {
        let mut state = self.state();
        state.now = Table {
            origin: Some(origin.to_owned()),
            ..Table::default()
        };
        // A reset is synced: what it forgets must not come back.
        state.synced = state.now.clone();
        Ok(())
    }

    fn sync(&self) -> Result<(), IndexError> {
        let mut state = self.state();
        state.synced = state.now.clone();
        Ok(())
    }
}
