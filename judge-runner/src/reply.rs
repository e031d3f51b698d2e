//! The next words of a case's simulated person.

use std::time::Duration;

use evalgrid_domain::{
    answerer::Failure,
    limits::REPLY_TIMEOUT_MS,
    person::{self, Conversation, ReplyRecord, read_reply},
    request::{Case, Player, User},
};
use evalgrid_proto::v1::{Replied, ReplyJob, job_result};
use evalgrid_worker::{End, Then};

use crate::{
    chat,
    harness::{self, Talk},
    job::{Answered, Job, Stop, json},
    model::Ended,
};

/// Asks the person of a lease. Its sandbox, where it has one, is its memory: it stays until the scheduler wants it gone.
pub(crate) async fn run(job: &Job<'_>, reply: &ReplyJob) -> End {
    let request = match job.request().await.map_err(|stop| job.settled(stop, "")) {
        Ok(request) => request,
        Err(Stop::Final(failure)) => return replied(job, ("", ""), Ended::failed(failure), None, false, 0),
        Err(stop) => return job.given_up(stop, Then::Keep),
    };
    let case = request.cases.get(job.lease.case_index as usize);
    let (Some(case), Some(User::Simulated { goal, prompt, by })) = (case, case.and_then(|case| case.user.as_ref())) else {
        let failure = Failure::Uncallable {
            reason: "the start request has no such person".into(),
        };
        return replied(job, ("", ""), Ended::failed(failure), None, false, 0);
    };
    let (by_name, model) = match by {
        Some(player) => (&*format!("{}/{}", player.harness.name(), player.model), player.model.as_str()),
        None => (job.lease.model.as_str(), job.lease.model.as_str()),
    };
    let harness = by.as_ref().map_or("", |player| player.harness.name());
    let asked = ask(job, reply, (goal, prompt), by.as_ref(), lifetime(case)).await;
    match asked.map_err(|stop| job.settled(stop, harness)) {
        Ok(answered) => replied(job, (by_name, model), answered.ended, answered.session_id, true, answered.spent_ms),
        Err(Stop::Final(failure)) => replied(job, (by_name, model), Ended::failed(failure), None, false, 0),
        Err(stop) => job.given_up(stop, Then::Keep),
    }
}

async fn ask(
    job: &Job<'_>,
    reply: &ReplyJob,
    (goal, prompt): (&str, &str),
    by: Option<&Player>,
    lifetime: Duration,
) -> Result<Answered, Stop> {
    let lease = job.lease;
    job.may_ask(by.map_or(lease.model_provider.as_str(), |player| player.harness.name()))?;
    let conversation: Conversation = job.read(reply.conversation.as_ref()).await?;
    let Some(player) = by else {
        let messages = &person::messages(&conversation, goal, prompt);
        return job
            .ask_model(REPLY_TIMEOUT_MS, |endpoint, terms| {
                chat::person(job.http, endpoint, messages, terms)
            })
            .await;
    };
    // Its memory goes on only where its sandbox does.
    let session_id = Some(reply.session_id.as_str()).filter(|id| lease.adopt && !id.is_empty());
    let words = match session_id {
        Some(_) => person::latest(&conversation),
        None => person::whole(&conversation, goal, prompt),
    };
    let talk = Talk {
        harness: player.harness.name(),
        model: &player.model,
        credential: &job.credential,
        step: &step(reply.turn, lease.refused + lease.unclear),
        number: reply.turn,
        prompt: &words,
        session_id,
        limit_ms: REPLY_TIMEOUT_MS,
        left: job.left(REPLY_TIMEOUT_MS)?,
    };
    let mut answered = harness::ask(job, talk, lifetime).await?;
    // An empty reply is how a model ends a conversation; an agent that ends without a word has only failed to speak.
    if answered.ended.raw.is_none() && answered.ended.said.as_ref().is_ok_and(|said| said.trim().is_empty()) {
        answered.ended.said = Err(Failure::Harness {
            harness: player.harness.name().to_owned(),
            reason: "it said nothing".into(),
        });
    }
    Ok(answered)
}

/// A person's sandbox lives as long as the conversation may last. Where that takes longer, the next one is told what was said.
fn lifetime(case: &Case) -> Duration {
    let talking = u64::from(case.time_limit_ms()) + REPLY_TIMEOUT_MS * u64::from(case.turn_limit());
    Duration::from_millis(talking) + harness::LIFETIME_MARGIN
}

/// Each process of a sandbox has a name of its own, and is started once.
fn step(turn: u32, earlier: u32) -> String {
    match earlier {
        0 => format!("reply.{turn}"),
        earlier => format!("reply.{turn}.{}", earlier + 1),
    }
}

/// The end of a lease that brought a reply, or the certainty that there will be none. `by`: who plays the person, and the model that is paid for.
fn replied(job: &Job<'_>, (by, model): (&str, &str), ended: Ended, session_id: Option<String>, asked: bool, spent_ms: u64) -> End {
    let reply = ended.said.and_then(|text| Ok(read_reply(&text)?));
    let failed = reply.is_err();
    let record = ReplyRecord::new(reply, by, job.lease.spent_ms + spent_ms, &job.redactor);
    let replied = Replied {
        record: json(&record),
        failed,
        spend: job.spend(model, asked, ended.usage),
        session_id,
    };
    job.end(job_result::Result::Replied(replied), spent_ms, Then::Keep)
}
