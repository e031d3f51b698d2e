//! An index in memory, for tests and simulation.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Index, IndexError, KeyValue, Row, check_rows};

/// Rows in memory.
#[derive(Debug, Default)]
pub struct MemoryIndex {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rows: BTreeMap<Vec<u8>, Vec<u8>>,
    position: u64,
    origin: Option<String>,
}

impl MemoryIndex {
    /// An empty index.
    pub fn new() -> MemoryIndex {
        MemoryIndex::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index for MemoryIndex {
    fn apply(&self, position: u64, rows: &[Row]) -> Result<(), IndexError> {
        let mut state = self.state();
        check_rows(position, state.position, rows)?;
        for (key, value) in rows {
            match value {
                Some(value) => state.rows.insert(key.clone(), value.clone()),
                None => state.rows.remove(key),
            };
        }
        state.position = position;
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        Ok(self.state().rows.get(key).cloned())
    }

    fn scan(&self, prefix: &[u8], after: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, IndexError> {
        let from = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        let state = self.state();
        let rows = state
            .rows
            .range::<[u8], _>((from, Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(prefix));
        Ok(rows.take(limit).map(|(key, value)| (key.clone(), value.clone())).collect())
    }

    fn position(&self) -> Result<u64, IndexError> {
        Ok(self.state().position)
    }

    fn sync(&self) -> Result<(), IndexError> {
        Ok(())
    }

    fn origin(&self) -> Result<Option<String>, IndexError> {
        Ok(self.state().origin.clone())
    }

    fn reset(&self, origin: &str) -> Result<(), IndexError> {
        *self.state() = State {
            origin: Some(origin.to_owned()),
            ..State::default()
        };
        Ok(())
    }
}
