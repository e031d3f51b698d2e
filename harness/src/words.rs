//! What an agent has come to that was asked to answer in words only.

use evalgrid_domain::evidence::Role;

use crate::HarnessEvent;

/// Names of tools that are kept: one is enough to refuse an answer, and more are for people.
const MAX_TOOLS: usize = 8;

/// The answer of a judge or a person, gathered from a turn's events.
///
/// ```
/// # use evalgrid_harness::{HarnessEvent, Spoken};
/// # fn read(take: &mut dyn FnMut(HarnessEvent)) {}
/// let mut spoken = Spoken::default();
/// read(&mut |event| spoken.take(event));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spoken {
    /// The agent's last message; `None` where it said nothing. As long as the agent made it.
    pub answer: Option<String>,
    /// What it used instead of words, each once, in order: a tool's name as the agent calls it, `a command` or `a file change`.
    pub tools: Vec<String>,
}

impl Spoken {
    /// Takes the next event.
    pub fn take(&mut self, event: HarnessEvent) {
        match event {
            HarnessEvent::Message {
                role: Role::Assistant,
                text,
                ..
            } => self.answer = Some(text),
            HarnessEvent::Command { .. } => self.used("a command".into()),
            HarnessEvent::FileChange { .. } => self.used("a file change".into()),
            HarnessEvent::ToolCall { name, .. } => self.used(name),
            _ => {}
        }
    }

    fn used(&mut self, tool: String) {
        if self.tools.len() < MAX_TOOLS && !self.tools.contains(&tool) {
            self.tools.push(tool);
        }
    }
}
