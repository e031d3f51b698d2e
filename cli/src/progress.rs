//! Following a batch: on a terminal a board that is redrawn in place, elsewhere one line per trial that has ended.

use std::{collections::BTreeMap, io::IsTerminal as _, time::Duration};

use evalgrid_proto::v1::{Batch, BatchProgress, BatchStatus, GetBatchRequest, Missing, TrialProgress, TrialStatus, WatchBatchRequest};
use tokio::time::{Instant, sleep, sleep_until};
use tonic::Code;

use crate::{
    Failure,
    client::{self, Batches},
    grid, output,
    reasons::{self, Reasons},
};

/// How long a lost scheduler is waited for before we give up; a restart takes far less.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two attempts to find it again.
const PAUSE: Duration = Duration::from_millis(500);
/// Without news for this long, a batch of which nothing runs is said to wait. An executor that is there takes a trial at once.
const QUIET: Duration = Duration::from_secs(5);
/// Where lines are printed, one comes at least this often: who reads a log sees that the batch is still followed, and how far it is.
const SIGN_OF_LIFE: Duration = Duration::from_secs(60);
/// Rows of a board; what is higher than a screen cannot be redrawn in place.
const ROWS: usize = 20;
/// Longest reason behind a trial.
const REASON: usize = 160;
/// Columns of a board; a line that wraps cannot be redrawn in place.
const COLUMNS: usize = 78;

/// Shows what happens in a batch until it has ended; answers with its result.
pub(crate) async fn follow(batches: &mut Batches, id: &str) -> Result<Batch, Failure> {
    let batch = get(batches, id).await?;
    let mut shown = Shown {
        board: Board::new(&batch),
        screen: Screen::new(),
        news_at: Instant::now(),
        said_at: Instant::now(),
        waiting: None,
        missing: Vec::new(),
    };
    let mut lost_since: Option<Instant> = None;
    loop {
        match updates(batches, id, &mut shown, &mut lost_since).await? {
            Stream::Ended => break,
            Stream::Lost(status) => {
                let since = *lost_since.get_or_insert_with(Instant::now);
                if since.elapsed() > PATIENCE {
                    return Err(client::refused(&status));
                }
                sleep(PAUSE).await;
            }
        }
    }
    shown.screen.leave()?;
    get(batches, id).await
}

/// The batch as it stands.
pub(crate) async fn get(batches: &mut Batches, id: &str) -> Result<Batch, Failure> {
    let answer = batches.get(GetBatchRequest { id: id.to_owned() }).await;
    answer.map(tonic::Response::into_inner).map_err(|status| client::refused(&status))
}

/// What a person sees, and when it last changed.
struct Shown {
    board: Board,
    screen: Screen,
    news_at: Instant,
    /// When a line was last printed, or began to be waited for.
    said_at: Instant,
    /// Said once, if nothing begins; on a board without the command, which need not fit.
    waiting: Option<String>,
    /// Whom trials wait for who is not connected, as the scheduler says.
    missing: Vec<Missing>,
}

impl Shown {
    /// Everything that is open waits, and that was not said yet. Where some trials run, the others wait for them, which is as it should be.
    fn may_be_stuck(&self) -> bool {
        self.waiting.is_none() && self.board.count(TrialStatus::Running) == 0 && self.board.count(TrialStatus::Queued) > 0
    }

    fn say_that_it_waits(&mut self) -> Result<(), Failure> {
        let waiting = self.board.count(TrialStatus::Queued);
        let verb = if waiting == 1 { "waits" } else { "wait" };
        let line = format!(
            "waiting: {} {verb} for a free slot; is an executor connected?",
            output::count(waiting, "trial")
        );
        self.waiting = Some(line.clone());
        self.show(&[format!("{line} ({} executor …)", output::program())])
    }

    async fn take(&mut self, batches: &mut Batches, progress: &BatchProgress) -> Result<(), Failure> {
        if !progress.trials.is_empty() {
            self.news_at = Instant::now();
        }
        let ended = self.board.take(progress);
        // A terminal shows no lines; the reasons come at the end.
        let reasons = match self.screen.terminal {
            true => Reasons::new(),
            false => {
                let trials: Vec<&TrialProgress> = ended.iter().map(|ended| &ended.trial).collect();
                reasons::of_ended(batches, &self.board.runs, &trials).await
            }
        };
        let mut lines: Vec<_> = ended.iter().map(|ended| self.board.line(ended, &reasons)).collect();
        lines.extend(changed(&self.missing, &progress.missing));
        self.missing.clone_from(&progress.missing);
        self.show(&lines)
    }

    fn say_that_it_lives(&mut self) -> Result<(), Failure> {
        let mut lines = vec![self.board.counted()];
        lines.extend(self.missing.iter().map(waiting_for));
        self.show(&lines)
    }

    fn show(&mut self, lines: &[String]) -> Result<(), Failure> {
        if !lines.is_empty() {
            self.said_at = Instant::now();
        }
        let mut board = self.board.draw();
        board.extend(self.missing.iter().map(|missing| output::short(&waiting_for(missing), COLUMNS)));
        if self.board.count(TrialStatus::Running) == 0 {
            board.extend(self.waiting.clone().filter(|_| self.board.count(TrialStatus::Queued) > 0));
        }
        self.screen.show(lines, &board)
    }
}

/// `waiting: 4 trials wait for a judge runner, and none is connected`.
fn waiting_for(missing: &Missing) -> String {
    let verb = if missing.trials == 1 { "waits" } else { "wait" };
    format!(
        "waiting: {} {verb} for {}, and none is connected",
        output::count(missing.trials, "trial"),
        output::plain(&missing.what)
    )
}

/// What is said of those who are missing now, and were not before, and the other way round. How many trials wait for them is no news.
fn changed(before: &[Missing], now: &[Missing]) -> Vec<String> {
    let lacks = |all: &[Missing], one: &Missing| all.iter().all(|other| other.what != one.what);
    let new = now.iter().filter(|missing| lacks(before, missing)).map(waiting_for);
    let over = before.iter().filter(|missing| lacks(now, missing));
    new.chain(over.map(|missing| format!("no longer waiting for {}", output::plain(&missing.what))))
        .collect()
}

enum Stream {
    Ended,
    Lost(tonic::Status),
}

async fn updates(batches: &mut Batches, id: &str, shown: &mut Shown, lost_since: &mut Option<Instant>) -> Result<Stream, Failure> {
    // One that comes again gets every trial's state at once, so nothing is missed.
    let passing = |status: tonic::Status| match status.code() {
        Code::NotFound | Code::Unauthenticated | Code::PermissionDenied | Code::InvalidArgument => Err(client::refused(&status)),
        _ => Ok(Stream::Lost(status)),
    };
    let mut stream = match batches.watch(WatchBatchRequest { id: id.to_owned() }).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return passing(status),
    };
    loop {
        let message = tokio::select! {
            message = stream.message() => message,
            () = sleep_until(shown.news_at + QUIET), if shown.may_be_stuck() => {
                shown.say_that_it_waits()?;
                continue;
            }
            () = sleep_until(shown.said_at + SIGN_OF_LIFE), if !shown.screen.terminal => {
                shown.say_that_it_lives()?;
                continue;
            }
        };
        match message {
            Ok(Some(progress)) => {
                *lost_since = None;
                shown.take(batches, &progress).await?;
                if !matches!(progress.status(), BatchStatus::Running | BatchStatus::Unspecified) {
                    return Ok(Stream::Ended);
                }
            }
            Ok(None) => return Ok(Stream::Lost(tonic::Status::unavailable("the scheduler ended the stream"))),
            Err(status) => return passing(status),
        }
    }
}

/// Where every trial stands.
struct Board {
    cases: Vec<String>,
    variants: Vec<String>,
    /// By case, variant and ordinal.
    trials: BTreeMap<(u32, u32, u32), State>,
    /// Ids of the runs, by case and variant.
    runs: BTreeMap<(u32, u32), String>,
}

/// What a trial is about, as far as a person wants to know.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Status(TrialStatus),
    /// Its agent is done, and its judges are asked.
    Judged,
    /// Its agent waits for the simulated person to say something.
    Waits,
}

impl State {
    fn of(trial: &TrialProgress) -> State {
        let status = trial.status();
        let person = trial.step.strip_prefix("turn.").is_some_and(|step| step.ends_with(".person"));
        match trial.step.starts_with("judge.") {
            _ if settled(status) => State::Status(status),
            true => State::Judged,
            false if person => State::Waits,
            false => State::Status(status),
        }
    }

    /// Without what it waits for.
    fn status(self) -> TrialStatus {
        match self {
            State::Status(status) => status,
            State::Judged | State::Waits => TrialStatus::Running,
        }
    }

    fn sign(self) -> char {
        match self {
            State::Status(TrialStatus::Passed) => '✓',
            State::Status(TrialStatus::Failed) => '✗',
            State::Status(TrialStatus::Void) => '○',
            State::Status(TrialStatus::Running) => '▸',
            State::Status(TrialStatus::Queued | TrialStatus::Unspecified) => '·',
            State::Judged => '?',
            State::Waits => '…',
        }
    }
}

/// A trial that has ended, and how many had by then.
struct Ended {
    done: usize,
    trial: TrialProgress,
}

impl Board {
    fn new(batch: &Batch) -> Board {
        Board {
            cases: (0..batch.cases.len() as u32).map(|index| grid::case_name(batch, index)).collect(),
            variants: grid::variant_names(batch),
            trials: batch
                .runs
                .iter()
                .flat_map(|run| {
                    run.trials.iter().map(|trial| {
                        (
                            (run.case_index, run.variant_index, trial.ordinal),
                            State::Status(TrialStatus::Queued),
                        )
                    })
                })
                .collect(),
            runs: batch
                .runs
                .iter()
                .map(|run| ((run.case_index, run.variant_index), run.id.clone()))
                .collect(),
        }
    }

    /// Takes the changes in; answers with the trials that have ended since.
    fn take(&mut self, progress: &BatchProgress) -> Vec<Ended> {
        let mut ended = Vec::new();
        for trial in &progress.trials {
            let key = (trial.case_index, trial.variant_index, trial.ordinal);
            let before = self.trials.insert(key, State::of(trial));
            if settled(trial.status()) && before.is_none_or(|state| !settled(state.status())) {
                ended.push(Ended {
                    done: self.counts().0,
                    trial: trial.clone(),
                });
            }
        }
        ended
    }

    fn count(&self, status: TrialStatus) -> usize {
        self.trials.values().filter(|known| known.status() == status).count()
    }

    /// What those that run wait for, where it is not their agent.
    fn waiting_for_others(&self) -> String {
        let count = |state: State| self.trials.values().filter(|known| **known == state).count();
        let parts = [(count(State::Judged), "being judged"), (count(State::Waits), "in talk")];
        let parts = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"));
        match parts.collect::<Vec<_>>().join(", ") {
            parts if parts.is_empty() => parts,
            parts => format!(" ({parts})"),
        }
    }

    fn counts(&self) -> (usize, usize) {
        (
            self.trials.values().filter(|state| settled(state.status())).count(),
            self.trials.len(),
        )
    }

    fn line(&self, ended: &Ended, reasons: &Reasons) -> String {
        let Ended { done, trial } = ended;
        let all = self.trials.len();
        let name = |names: &[String], index: u32| names.get(index as usize).cloned().unwrap_or_default();
        let (case, variant) = (name(&self.cases, trial.case_index), name(&self.variants, trial.variant_index));
        let width = all.to_string().len();
        let reason = reasons.get(&(trial.case_index, trial.variant_index, trial.ordinal));
        let failure = trial
            .failure
            .as_deref()
            .or(reason.map(String::as_str))
            .map(|failure| format!(": {}", output::short(failure, REASON)))
            .unwrap_or_default();
        format!(
            "[{done:width$}/{all}] {:6}  {case} × {variant} #{}{failure}",
            word(trial.status()),
            trial.ordinal
        )
    }

    /// How far it is, in numbers.
    fn counted(&self) -> String {
        let (done, all) = self.counts();
        format!(
            "{done}/{all}  {} passed  {} failed  {} void  {} running{}",
            self.count(TrialStatus::Passed),
            self.count(TrialStatus::Failed),
            self.count(TrialStatus::Void),
            self.count(TrialStatus::Running),
            self.waiting_for_others(),
        )
    }

    /// One line per case with a sign per trial, where that fits; always a bar.
    fn draw(&self) -> Vec<String> {
        let (done, all) = self.counts();
        let filled = 30 * done / all.max(1);
        let bar = format!("[{}{}] {}", "#".repeat(filled), "-".repeat(30 - filled), self.counted());
        let mut lines = self.rows();
        if lines.len() > ROWS || lines.iter().any(|line| line.chars().count() > COLUMNS) {
            lines.clear();
        }
        lines.push(bar);
        lines
    }

    fn rows(&self) -> Vec<String> {
        let name_width = self.cases.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let cell = |case: u32, variant: u32| -> String {
            let trials = self.trials.range((case, variant, 0)..=(case, variant, u32::MAX));
            trials.map(|(_, state)| state.sign()).collect()
        };
        let width = |variant: usize| {
            let name = self.variants[variant].chars().count();
            (0..self.cases.len())
                .map(|case| cell(case as u32, variant as u32).chars().count())
                .max()
                .unwrap_or(0)
                .max(name)
        };
        let pad = |text: &str, width: usize| format!("{text:width$}");
        let mut heads = vec![pad("", name_width)];
        heads.extend(self.variants.iter().enumerate().map(|(variant, name)| pad(name, width(variant))));
        let mut lines = vec![heads.join("  ")];
        for (case, name) in self.cases.iter().enumerate() {
            let mut cells = vec![pad(name, name_width)];
            cells.extend((0..self.variants.len()).map(|variant| pad(&cell(case as u32, variant as u32), width(variant))));
            lines.push(cells.join("  "));
        }
        lines
    }
}

fn settled(status: TrialStatus) -> bool {
    matches!(status, TrialStatus::Passed | TrialStatus::Failed | TrialStatus::Void)
}

fn word(status: TrialStatus) -> &'static str {
    match status {
        TrialStatus::Passed => "passed",
        TrialStatus::Failed => "failed",
        TrialStatus::Void => "void",
        TrialStatus::Running => "running",
        TrialStatus::Queued | TrialStatus::Unspecified => "queued",
    }
}

/// Where it is shown.
struct Screen {
    terminal: bool,
    /// Lines on the terminal that the next drawing replaces.
    drawn: usize,
}

impl Screen {
    fn new() -> Screen {
        Screen {
            terminal: std::io::stdout().is_terminal() && std::env::var_os("TERM").is_some_and(|term| term != "dumb"),
            drawn: 0,
        }
    }

    fn show(&mut self, lines: &[String], board: &[String]) -> Result<(), Failure> {
        if !self.terminal {
            return lines.iter().try_for_each(|line| output::line(line));
        }
        let mut text = String::new();
        if self.drawn > 0 {
            // Up to the first drawn line, and clear from there on.
            text.push_str(&format!("\x1b[{}A\x1b[J", self.drawn));
        }
        for line in board {
            text.push_str(line);
            text.push('\n');
        }
        self.drawn = board.len();
        output::print(&text)
    }

    fn leave(&mut self) -> Result<(), Failure> {
        self.drawn = 0;
        output::line("")
    }
}

#[cfg(test)]
mod tests {
    use evalgrid_proto::v1::{CaseInfo, Run, Trial, VariantInfo};

    use super::*;

    fn board(trials: u32, cases: &[&str]) -> Board {
        let run = |case: usize| Run {
            case_index: case as u32,
            trials: (1..=trials)
                .map(|ordinal| Trial {
                    ordinal,
                    ..Trial::default()
                })
                .collect(),
            ..Run::default()
        };
        let case = |id: &&str| CaseInfo {
            id: (*id).to_owned(),
            ..CaseInfo::default()
        };
        let variant = VariantInfo {
            model: "m".into(),
            ..VariantInfo::default()
        };
        Board::new(&Batch {
            cases: cases.iter().map(case).collect(),
            variants: vec![variant],
            runs: (0..cases.len()).map(run).collect(),
            ..Batch::default()
        })
    }

    fn change(ordinal: u32, status: TrialStatus, failure: Option<&str>) -> TrialProgress {
        TrialProgress {
            ordinal,
            status: status.into(),
            failure: failure.map(str::to_owned),
            ..TrialProgress::default()
        }
    }

    #[test]
    fn a_trial_is_told_once() {
        use TrialStatus::{Failed, Passed, Queued, Running, Void};
        let mut board = board(3, &["greet"]);
        let mut check = |changes: &[(u32, TrialStatus, Option<&str>)], lines: &[&str], row: &str| {
            let trials = changes
                .iter()
                .map(|(ordinal, status, failure)| change(*ordinal, *status, *failure))
                .collect();
            let progress = BatchProgress {
                trials,
                ..BatchProgress::default()
            };
            let reasons = Reasons::from([((0, 0, 2), "`false` exited with 1".to_owned())]);
            let ended = board.take(&progress);
            let got: Vec<_> = ended.iter().map(|ended| board.line(ended, &reasons)).collect();
            assert_eq!(got, lines);
            assert_eq!(board.draw()[1], row);
        };
        check(&[(1, Queued, None), (2, Running, None)], &[], "greet  ·▸·");
        check(&[(1, Passed, None)], &["[1/3] passed  greet × m #1"], "greet  ✓▸·");
        check(&[(1, Passed, None)], &[], "greet  ✓▸·");
        check(
            &[(2, Failed, None), (3, Void, Some("no\x1b[2J route"))],
            &[
                "[2/3] failed  greet × m #2: `false` exited with 1",
                "[3/3] void    greet × m #3: no [2J route",
            ],
            "greet  ✓✗○",
        );
        assert_eq!(
            board.draw()[2],
            format!("[{}] 3/3  1 passed  1 failed  1 void  0 running", "#".repeat(30))
        );
    }

    #[test]
    fn who_is_waited_for_is_told() {
        use TrialStatus::{Passed, Running};
        let mut board = board(4, &["greet"]);
        let mut check = |ordinal, status, step: &str, row: &str, bar: &str| {
            let trial = TrialProgress {
                step: step.into(),
                ..change(ordinal, status, None)
            };
            board.take(&BatchProgress {
                trials: vec![trial],
                ..BatchProgress::default()
            });
            let drawn = board.draw();
            assert_eq!(drawn[1], row);
            assert!(drawn[2].ends_with(bar), "{}", drawn[2]);
        };
        check(1, Running, "turn.1.agent", "greet  ▸···", "1 running");
        check(2, Running, "turn.2.person", "greet  ▸…··", "2 running (1 in talk)");
        check(3, Running, "judge.0", "greet  ▸…?·", "3 running (1 being judged, 1 in talk)");
        check(3, Passed, "judge.0", "greet  ▸…✓·", "2 running (1 in talk)");
    }

    #[test]
    fn who_is_missing_is_told_when_that_changes() {
        let missing = |all: &[(&str, u32)]| -> Vec<Missing> {
            let missing = all.iter().map(|(what, trials)| Missing {
                what: (*what).to_owned(),
                trials: *trials,
            });
            missing.collect()
        };
        let check = |before: &[(&str, u32)], now: &[(&str, u32)], lines: &[&str]| {
            assert_eq!(changed(&missing(before), &missing(now)), lines);
        };
        let (one, other) = ("a judge runner", "a judge runner with docker sandboxes");
        check(&[], &[], &[]);
        check(
            &[],
            &[(one, 1)],
            &["waiting: 1 trial waits for a judge runner, and none is connected"],
        );
        check(&[(one, 1)], &[(one, 4)], &[]);
        check(
            &[(one, 4)],
            &[(one, 4), (other, 2)],
            &["waiting: 2 trials wait for a judge runner with docker sandboxes, and none is connected"],
        );
        check(&[(one, 4), (other, 2)], &[(other, 2)], &["no longer waiting for a judge runner"]);
    }

    #[test]
    fn what_does_not_fit_is_a_bar() {
        assert_eq!(board(1, &["a"; 30]).draw().len(), 1);
        assert_eq!(board(100, &["a"]).draw().len(), 1);
        assert_eq!(board(1, &["a"; 19]).draw().len(), 21);
    }
}
