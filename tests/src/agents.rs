//! The real agents for tests: where they are installed, and a server whose agents find a model server of ours.

use std::path::{Path, PathBuf};

use crate::server::Server;

/// A built-in agent, and how a server is told where its model is.
pub struct Agent {
    /// As in a variant.
    pub name: &'static str,
    key: &'static str,
    base_url: &'static str,
    /// What the base URL ends in.
    path: &'static str,
}

const fn agent(name: &'static str, key: &'static str, base_url: &'static str, path: &'static str) -> Agent {
    Agent { name, key, base_url, path }
}

/// All that come from a package.
pub const AGENTS: &[Agent] = &[
    agent("codex", "OPENAI_API_KEY", "OPENAI_BASE_URL", "/v1"),
    agent("claude", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", ""),
    agent("gemini", "GEMINI_API_KEY", "GOOGLE_GEMINI_BASE_URL", ""),
    agent("opencode", "OPENCODE_API_KEY", "OPENCODE_BASE_URL", "/v1"),
    agent("qwen", "DASHSCOPE_API_KEY", "QWEN_BASE_URL", "/v1"),
    agent("pi", "PI_API_KEY", "PI_BASE_URL", "/v1"),
    agent("bub", "BUB_API_KEY", "BUB_API_BASE", "/v1"),
];

/// Where agents are installed, for all tests: `EVALGRID_TEST_TOOLS`, or a folder of the user's cache, which `cargo xtask install` fills.
pub fn tools() -> PathBuf {
    let named = std::env::var_os("EVALGRID_TEST_TOOLS").map(PathBuf::from);
    named.unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache/evalgrid/tools"))
}

/// A key that no vendor has given out.
pub fn key_of(agent: &str) -> String {
    format!("sk-made-up-key-of-{agent}-0123456789")
}

/// A server whose agents find their models at `base`.
pub fn server(folder: &Path, base: &str, slots: u32) -> Server {
    let mut server = Server::new(folder);
    let tools = tools().to_str().unwrap().to_owned();
    server.executor = vec!["--slots".into(), slots.to_string(), "--tools".into(), tools];
    for agent in AGENTS {
        server.variables.push((agent.key.into(), key_of(agent.name)));
        server.variables.push((agent.base_url.into(), format!("{base}{}", agent.path)));
    }
    server
}
