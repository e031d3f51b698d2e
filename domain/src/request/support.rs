//! What a server can do, as far as a start request can ask for it.

use std::collections::{BTreeMap, BTreeSet};

use super::{Harness, Sandbox};

/// A part of the contract that a server may not have yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// `validator` with code.
    CodeValidator,
    /// A judge that is a provider's model.
    ModelJudge,
    /// A judge that is a harness.
    HarnessJudge,
    /// `prepare`.
    Prepare,
    /// `cache`.
    Cache,
    /// A person with fixed replies.
    ScriptedUser,
    /// A person played by a model.
    SimulatedUser,
    /// A person played by a harness.
    HarnessUser,
    /// `profile.variables`.
    ProfileVariables,
    /// `credentials.harnessRef` and `credentials.sandboxRef`.
    CredentialRefs,
    /// A profile that brings an HTTP mock (`workspace/.sphynx/api/program.json`).
    ApiMock,
}

/// What this server can do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Support {
    /// Agents that can run, each with the version that does; `unknown` where nobody but its author knows it.
    pub harnesses: BTreeMap<Harness, String>,
    /// Names of sandboxes that can be asked for, each with what really runs: `e2b` to `bubblewrap`, `bubblewrap` to itself.
    pub sandboxes: BTreeMap<Sandbox, Sandbox>,
    /// Parts of the contract that work.
    pub features: BTreeSet<Feature>,
}

impl Support {
    /// What really runs where a variant asks for `name`.
    pub fn provider(&self, name: Sandbox) -> Option<Sandbox> {
        self.sandboxes.get(&name).copied()
    }
}
