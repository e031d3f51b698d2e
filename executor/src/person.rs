//! Who answers the agent between its turns: nobody, a script, or a simulated person, whom a judge runner plays.
//!
//! A simulated person takes minutes. So the attempt ends when it is its turn, and gives its slot back; the reply comes as a recorded step with
//! the lease under which the trial goes on.

use evalgrid_domain::{
    evidence::{JournalEntry, Role},
    limits::{INLINE_EVIDENCE_BYTES, REPLY_TIMEOUT_MS},
    person::{Conversation, ReplyRecord, Speaker},
    request::{Case, User},
};
use evalgrid_proto::v1::{Evidence, evidence::Place};

use std::time::Duration;

use crate::{
    account::Account,
    trial::{Attempt, Stop, json},
    turns::TurnRecord,
};

/// Between two messages of the agent.
const BETWEEN: &str = "\n\n";
/// How long one reply may be waited for, in times of what the person itself may take: it may be refused for a while, and asked once more.
const WAITS_PER_REPLY: u32 = 2;

/// How long the replies of all turns may be waited for.
pub(crate) fn limit(case: &Case) -> Duration {
    match &case.user {
        Some(User::Simulated { .. }) => Duration::from_millis(REPLY_TIMEOUT_MS) * WAITS_PER_REPLY * case.turn_limit(),
        Some(User::Scripted { .. }) | None => Duration::ZERO,
    }
}

/// The person of a trial.
pub(crate) enum Person<'a> {
    Nobody,
    Scripted(std::slice::Iter<'a, String>),
    /// With all that was said so far, redacted.
    Simulated(Conversation),
}

/// A turn that has ended.
pub(crate) struct Turned<'a> {
    pub(crate) number: u32,
    /// What the agent was told.
    pub(crate) prompt: &'a str,
    /// What it said to that.
    pub(crate) answer: &'a str,
    pub(crate) finished_at_ms: u64,
    /// The agent has a session to go on with.
    pub(crate) resumes: bool,
}

/// All that the agent said in a turn.
pub(crate) fn answer(record: &TurnRecord) -> String {
    let said = record.entries.iter().filter_map(|entry| match entry {
        JournalEntry::Message { role, text, .. } if *role != Some(Role::User) => Some(text.as_str()),
        _ => None,
    });
    said.collect::<Vec<_>>().join(BETWEEN)
}

impl<'a> Person<'a> {
    pub(crate) fn of(case: &'a Case) -> Self {
        match &case.user {
            Some(User::Scripted { replies }) => Self::Scripted(replies.iter()),
            Some(User::Simulated { .. }) => Self::Simulated(Conversation::default()),
            None => Self::Nobody,
        }
    }

    /// What the person says behind this turn; `None`: the conversation is over. Where a simulated person has not replied yet, the attempt ends.
    pub(crate) async fn reply(&mut self, attempt: &Attempt<'_>, account: &mut Account, turned: Turned<'_>) -> Result<Option<String>, Stop> {
        let number = turned.number;
        let over = |why: &str| vec![format!("The conversation ended after turn {number}: {why}")];
        let conversation = match self {
            Self::Nobody => return Ok(None),
            Self::Scripted(replies) if replies.len() == 0 => return Ok(None),
            Self::Scripted(_) if number >= attempt.case.turn_limit() => return Ok(None),
            Self::Simulated(_) if number >= attempt.case.turn_limit() => {
                account.diagnostics(over("the case allows no more"));
                return Ok(None);
            }
            _ if !turned.resumes => {
                account.diagnostics(over("the agent printed no Started with a sessionId, so nothing could continue it"));
                return Ok(None);
            }
            Self::Scripted(replies) => return Ok(replies.next().cloned()),
            Self::Simulated(conversation) => conversation,
        };
        conversation.push(Speaker::Person, &attempt.redactor.text(turned.prompt));
        conversation.push(Speaker::Agent, turned.answer);
        let step = format!("turn.{number}.person");
        let Some(reply) = attempt.recalled::<ReplyRecord>(&step).await? else {
            return Err(awaited(attempt, number, conversation).await?);
        };
        attempt.note(&step, (turned.finished_at_ms, reply.duration_ms), reply.failure.is_some());
        if let Some(failure) = reply.failure {
            account.void(failure, &[]);
            return Ok(None);
        }
        if reply.done {
            account.diagnostics(over("the person has what it wanted"));
            if let Some(text) = reply.text {
                account.last_words(text, &attempt.redactor);
            }
            return Ok(None);
        }
        Ok(reply.text)
    }
}

/// The end of an attempt whose person speaks next. Everything recorded before is durable then.
async fn awaited(attempt: &Attempt<'_>, turn: u32, conversation: &Conversation) -> Result<Stop, Stop> {
    let bytes = json(conversation);
    let place = if bytes.len() <= INLINE_EVIDENCE_BYTES {
        Place::Inline(bytes)
    } else {
        Place::Object(attempt.worker.objects.put(&attempt.lease.organization_id, bytes).await?)
    };
    attempt.durable().await?;
    Ok(Stop::AwaitsReply {
        turn,
        conversation: Box::new(Evidence { place: Some(place) }),
    })
}
