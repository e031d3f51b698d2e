//! Results are written as they are read: one run after the other, one trial after the other, evidence straight through. So memory stays small
//! however large the evidence is. What goes wrong in the middle cuts the connection: a caller never sees a shortened document that parses.

use axum::{body::Body, response::Response};
use bytes::Bytes;
use evalgrid_domain::{evidence::TrialEvidence, request::SuiteBatchRequest};
use evalgrid_proto::v1::{Batch, Judged, ObjectRef, Run, RunInBatch, Trial, evidence::Place};
use futures::stream;
use http::{HeaderValue, header};
use serde::Serialize;
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    time::timeout,
};

use crate::{
    cell::call,
    failure::Failure,
    limits,
    ops::{App, Caller},
    render::{self, Incoherent},
    splice::{ArrayEnd, Splice},
};

/// EvalBatch.
pub(crate) async fn batch(app: &App, caller: Caller, batch: Batch) -> Result<Response, Failure> {
    respond(app, caller, batch, Whole::Batch).await
}

/// EvalRun.
pub(crate) async fn run(app: &App, caller: Caller, run: RunInBatch) -> Result<Response, Failure> {
    let batch = run.batch.filter(|batch| batch.runs.len() == 1);
    let batch = batch.ok_or_else(|| internal(&Incoherent("a run without its batch")))?;
    respond(app, caller, batch, Whole::Run).await
}

#[derive(Clone, Copy)]
enum Whole {
    Batch,
    Run,
}

fn internal(error: &dyn std::error::Error) -> Failure {
    tracing::error!(%error, "a result could not be written");
    Failure::Internal
}

/// Reads the start request while a failure can still be answered properly, then streams.
async fn respond(app: &App, caller: Caller, batch: Batch, whole: Whole) -> Result<Response, Failure> {
    let place = match timeout(limits::RESULT_WAIT, app.results.clone().acquire_owned()).await {
        Ok(Ok(place)) => place,
        Ok(Err(_)) | Err(_) => return Err(Failure::Unavailable("Too much is being read at once. Try again.".into())),
    };
    let reference = batch.request.clone().ok_or_else(|| internal(&Incoherent("no start request")))?;
    let size = usize::try_from(reference.size).unwrap_or(usize::MAX);
    let memory = app.requests.take(size.saturating_mul(limits::REQUEST_WEIGHT)).await?;
    let request = start_request(app, &caller, reference).await?;
    for run in &batch.runs {
        render::run_head(&batch, run, &request).map_err(|error| internal(&error))?;
    }

    let (pieces, receiver) = mpsc::channel(limits::PIECES_AHEAD);
    let work = Work {
        app: app.clone(),
        caller,
        batch,
        request,
        whole,
        _places: (place, memory),
    };
    tokio::spawn(work.write(Writer {
        pieces,
        buffer: Vec::with_capacity(limits::PIECE),
    }));
    let mut response = Response::new(Body::from_stream(stream::unfold(Some(receiver), next_piece)));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

async fn start_request(app: &App, caller: &Caller, reference: ObjectRef) -> Result<SuiteBatchRequest, Failure> {
    let mut bytes = Vec::new();
    let limit = usize::try_from(reference.size).unwrap_or(usize::MAX);
    let unread = |error| match error {
        // The batch is there, so its object must be: its absence is not the caller's mistake.
        Broken::Scheduler(status) if status.code() == tonic::Code::NotFound => {
            tracing::error!(reason = status.message(), "a start request is missing");
            Failure::lost()
        }
        Broken::Scheduler(status) => Failure::from_status(&status),
        error => internal(&error),
    };
    let mut object = Object::open(app, caller, reference).await.map_err(unread)?;
    while let Some(chunk) = object.next().await.map_err(unread)? {
        if bytes.len() + chunk.len() > limit {
            return Err(internal(&Incoherent("an object longer than announced")));
        }
        bytes.extend_from_slice(&chunk);
    }
    serde_json::from_slice(&bytes).map_err(|error| internal(&error))
}

/// A piece of the document, or its end. A channel that closes without the end means that the writer died.
enum Piece {
    Data(Bytes),
    End,
}

async fn next_piece(receiver: Option<mpsc::Receiver<Piece>>) -> Option<(Result<Bytes, Broken>, Option<mpsc::Receiver<Piece>>)> {
    let mut receiver = receiver?;
    match receiver.recv().await {
        Some(Piece::Data(bytes)) => Some((Ok(bytes), Some(receiver))),
        Some(Piece::End) => None,
        None => Some((Err(Broken::CutShort), None)),
    }
}

/// Why a result could not be written to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("the caller has gone, or takes nothing")]
    Caller,
    #[error("an object could not be read: {0}")]
    Scheduler(tonic::Status),
    #[error("an object did not go on in time")]
    Slow,
    #[error("evidence is not one JSON object of its announced size")]
    Evidence,
    #[error(transparent)]
    Incoherent(#[from] Incoherent),
    #[error("not serialised: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the result was cut short")]
    CutShort,
}

struct Work {
    app: App,
    caller: Caller,
    batch: Batch,
    request: SuiteBatchRequest,
    whole: Whole,
    _places: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

impl Work {
    async fn write(self, mut writer: Writer) {
        let written = timeout(limits::RESULT_DEADLINE, self.document(&mut writer)).await;
        match written.unwrap_or(Err(Broken::Caller)) {
            Ok(()) => {}
            Err(Broken::Caller) => tracing::debug!(batch = self.batch.id, "the caller left before the end of a result"),
            Err(error) => tracing::error!(batch = self.batch.id, %error, "a result was cut short"),
        }
    }

    async fn document(&self, writer: &mut Writer) -> Result<(), Broken> {
        match self.whole {
            Whole::Run => {
                for run in &self.batch.runs {
                    self.run(writer, run).await?;
                }
            }
            Whole::Batch => {
                writer.open(&render::batch_head(&self.batch))?;
                writer.text(b",\"runs\":[").await?;
                for (index, run) in self.batch.runs.iter().enumerate() {
                    writer.comma(index).await?;
                    self.run(writer, run).await?;
                }
                writer.text(b"]}").await?;
            }
        }
        writer.end().await
    }

    async fn run(&self, writer: &mut Writer, run: &Run) -> Result<(), Broken> {
        writer.open(&render::run_head(&self.batch, run, &self.request)?)?;
        writer.text(b",\"trials\":[").await?;
        for (index, trial) in run.trials.iter().enumerate() {
            writer.comma(index).await?;
            self.trial(writer, run, trial).await?;
        }
        writer.text(b"]}").await
    }

    async fn trial(&self, writer: &mut Writer, run: &Run, trial: &Trial) -> Result<(), Broken> {
        writer.open(&render::trial_head(trial))?;
        let outcome = trial.outcome.as_ref();
        let evidence = outcome.and_then(|outcome| outcome.evidence.as_ref());
        let judged = outcome.map(|outcome| outcome.judged.as_slice()).unwrap_or_default();
        let mut inside = Inside {
            work: self,
            run,
            splice: Splice::default(),
            added: Vec::new(),
        };
        if !judged.is_empty() {
            inside.added.push((ArrayEnd::of("validations"), Added::Judged(judged)));
        }
        // The checks have left none, or there would have been no judge.
        if let Some(outcome) = outcome.filter(|outcome| outcome.checks_passed.is_some() && !outcome.void_fields.is_empty()) {
            inside.added.push((ArrayEnd::of("voidFields"), Added::Fields(&outcome.void_fields)));
        }
        match evidence.and_then(|evidence| evidence.place.as_ref()) {
            None => {
                let void_fields = outcome.map(|outcome| outcome.void_fields.clone()).unwrap_or_default();
                let none = TrialEvidence {
                    void_fields,
                    ..TrialEvidence::default()
                };
                inside.push(writer, &serde_json::to_vec(&none)?).await?;
            }
            Some(Place::Inline(bytes)) => inside.push(writer, bytes).await?,
            Some(Place::Object(reference)) => {
                let mut object = Object::open(&self.app, &self.caller, reference.clone()).await?;
                while let Some(chunk) = object.next().await? {
                    inside.push(writer, &chunk).await?;
                }
            }
        }
        inside.end()?;
        writer.text(b"}").await
    }

    /// The record of one judge, as it is stored, or as much of one as its verdict tells.
    async fn judged(&self, writer: &mut Writer, run: &Run, judged: &Judged) -> Result<(), Broken> {
        match judged.validation.as_ref().and_then(|validation| validation.place.as_ref()) {
            None => {
                let record = render::judged(judged, &self.batch, run, &self.request)?;
                writer.text(&serde_json::to_vec(&record)?).await
            }
            Some(Place::Inline(bytes)) => {
                check_ends((bytes.first(), bytes.last()))?;
                writer.text(bytes).await
            }
            Some(Place::Object(reference)) => {
                let mut object = Object::open(&self.app, &self.caller, reference.clone()).await?;
                let (mut first, mut last) = (None, None);
                while let Some(chunk) = object.next().await? {
                    first = first.or(chunk.first().copied());
                    last = chunk.last().copied().or(last);
                    writer.text(&chunk).await?;
                }
                check_ends((first.as_ref(), last.as_ref()))
            }
        }
    }
}

/// Of a JSON object.
fn check_ends(ends: (Option<&u8>, Option<&u8>)) -> Result<(), Broken> {
    (ends == (Some(&b'{'), Some(&b'}'))).then_some(()).ok_or(Broken::Evidence)
}

/// The evidence of a trial on its way into the answer, and what its judges add to arrays in it.
struct Inside<'a> {
    work: &'a Work,
    run: &'a Run,
    splice: Splice,
    /// Until its place has gone by.
    added: Vec<(ArrayEnd, Added<'a>)>,
}

/// More elements of an array.
enum Added<'a> {
    Judged(&'a [Judged]),
    Fields(&'a [String]),
}

impl Inside<'_> {
    async fn push(&mut self, writer: &mut Writer, bytes: &[u8]) -> Result<(), Broken> {
        let mut here = Vec::new();
        self.added = std::mem::take(&mut self.added)
            .into_iter()
            .filter_map(|(mut end, added)| match end.find(bytes) {
                Some((at, filled)) => {
                    here.push((at, filled, added));
                    None
                }
                None => Some((end, added)),
            })
            .collect();
        here.sort_by_key(|(at, ..)| *at);
        let mut done = 0;
        for (at, filled, added) in here {
            self.splice.push(writer, &bytes[done..at]).await?;
            self.splice.release(writer).await?;
            self.add(writer, filled, &added).await?;
            done = at;
        }
        self.splice.push(writer, &bytes[done..]).await
    }

    async fn add(&self, writer: &mut Writer, filled: bool, added: &Added<'_>) -> Result<(), Broken> {
        let first = usize::from(filled);
        match added {
            Added::Judged(judged) => {
                let mut judged: Vec<&Judged> = judged.iter().collect();
                judged.sort_by_key(|judged| judged.index);
                for (place, judged) in (first..).zip(judged) {
                    writer.comma(place).await?;
                    self.work.judged(writer, self.run, judged).await?;
                }
            }
            Added::Fields(fields) => {
                for (place, field) in (first..).zip(*fields) {
                    writer.comma(place).await?;
                    writer.text(&serde_json::to_vec(field)?).await?;
                }
            }
        }
        Ok(())
    }

    fn end(self) -> Result<(), Broken> {
        match self.added.is_empty() {
            true => self.splice.end(),
            // There are judgments, and no place for them.
            false => Err(Broken::Evidence),
        }
    }
}

/// An object on its way, held to its announced size.
pub(crate) struct Object {
    chunks: tonic::Streaming<evalgrid_proto::v1::ObjectChunk>,
    left: u64,
}

impl Object {
    pub(crate) async fn open(app: &App, caller: &Caller, reference: ObjectRef) -> Result<Object, Broken> {
        let left = reference.size;
        let open = call!(batches, get_object, caller.request(reference.clone()));
        match timeout(limits::CALL_DEADLINE, app.cells.twice(caller, open)).await {
            Ok(Ok(response)) => Ok(Object {
                chunks: response.into_inner(),
                left,
            }),
            Ok(Err(status)) => Err(Broken::Scheduler(status)),
            Err(_) => Err(Broken::Slow),
        }
    }

    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Broken> {
        let message = timeout(limits::CHUNK_DEADLINE, self.chunks.message())
            .await
            .map_err(|_| Broken::Slow)?;
        let Some(chunk) = message.map_err(Broken::Scheduler)? else {
            return (self.left == 0).then_some(None).ok_or(Broken::Evidence);
        };
        self.left = self.left.checked_sub(chunk.data.len() as u64).ok_or(Broken::Evidence)?;
        Ok(Some(chunk.data))
    }
}

/// Collects what is written into pieces, and waits for the caller to take them.
pub(crate) struct Writer {
    pieces: mpsc::Sender<Piece>,
    buffer: Vec<u8>,
}

impl Writer {
    /// A JSON object that has at least one key, left open. It goes into the buffer whole.
    fn open(&mut self, object: &impl Serialize) -> Result<(), Broken> {
        serde_json::to_writer(&mut self.buffer, object)?;
        let brace = self.buffer.pop();
        debug_assert_eq!(brace, Some(b'}'));
        Ok(())
    }

    async fn comma(&mut self, index: usize) -> Result<(), Broken> {
        match index {
            0 => Ok(()),
            _ => self.text(b",").await,
        }
    }

    pub(crate) async fn text(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= limits::PIECE {
            let full = std::mem::replace(&mut self.buffer, Vec::with_capacity(limits::PIECE));
            self.send(Piece::Data(full.into())).await?;
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<(), Broken> {
        let rest = std::mem::take(&mut self.buffer);
        self.send(Piece::Data(rest.into())).await?;
        self.send(Piece::End).await
    }

    async fn send(&mut self, piece: Piece) -> Result<(), Broken> {
        match timeout(limits::PIECE_DEADLINE, self.pieces.send(piece)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Broken::Caller),
        }
    }
}
