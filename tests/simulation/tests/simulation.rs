//! Thousands of seeds in which every promise must hold, and deliberate defects that must be found.
//!
//! `EVALGRID_SEED=n` runs one seed alone and prints its events, `EVALGRID_LONG=1` runs fifty times as many seeds.
#![allow(clippy::unwrap_used)]

use std::{
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use evalgrid_simulation::{Defect, KINDS, Options, Report, Trouble, run};

/// Seeds of an ordinary run: what two cores do in a minute or two, beside all else.
const SEEDS: u64 = 2_000;
/// Seeds of a long one.
const LONG_SEEDS: u64 = 100_000;
/// So many seeds may pass before a defect is found.
const SEEDS_PER_DEFECT: u64 = 1_000;
/// Failing seeds that are told in full.
const SHOWN: usize = 3;

/// What came of many seeds.
struct Sum {
    seeds: u64,
    events: u64,
    micros: u64,
    records: u64,
    struck: [u64; KINDS],
    failed: Vec<u64>,
}

impl Sum {
    fn new() -> Sum {
        Sum {
            seeds: 0,
            events: 0,
            micros: 0,
            records: 0,
            struck: [0; KINDS],
            failed: Vec::new(),
        }
    }

    fn add(&mut self, report: &Report) {
        self.seeds += 1;
        self.events += report.events;
        self.micros += report.micros;
        self.records += report.records;
        for (sum, one) in self.struck.iter_mut().zip(report.struck) {
            *sum += one;
        }
        self.failed.extend(report.violation.iter().map(|_| report.seed));
    }
}

/// Runs the seeds on all cores.
fn run_all(seeds: u64) -> Sum {
    let (next, sum) = (AtomicU64::new(0), Mutex::new(Sum::new()));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds || sum.lock().unwrap().failed.len() >= SHOWN {
                return;
            }
            let report = run(seed, Options::default());
            sum.lock().unwrap().add(&report);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    sum.into_inner().unwrap()
}

fn show(seed: u64, print: bool) -> Report {
    let options = Options {
        trace: true,
        print,
        defect: None,
    };
    let report = run(seed, options);
    println!("{report}");
    report
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a person wants to know how fast it was")]
fn every_promise_holds() {
    if let Ok(seed) = std::env::var("EVALGRID_SEED") {
        let report = show(seed.parse().unwrap(), true);
        assert_eq!(report.violation, None);
        return;
    }
    let long = std::env::var_os("EVALGRID_LONG").is_some();
    let began = Instant::now();
    let sum = run_all(if long { LONG_SEEDS } else { SEEDS });
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{} seeds, {:.0} simulated hours, {} records in {seconds:.0} s: {:.0} simulated steps/s, {:.0} seeds/min",
        sum.seeds,
        sum.micros as f64 / 3.6e9,
        sum.records,
        sum.events as f64 / seconds,
        sum.seeds as f64 * 60.0 / seconds,
    );
    for (trouble, struck) in Trouble::ALL.iter().zip(sum.struck) {
        println!("{struck:>10} {trouble:?}");
    }
    for seed in &sum.failed {
        show(*seed, false);
    }
    assert_eq!(
        sum.failed,
        [] as [u64; 0],
        "these seeds break a promise; run one with EVALGRID_SEED"
    );
    for (trouble, struck) in Trouble::ALL.iter().zip(sum.struck) {
        assert!(struck > 0, "{trouble:?} has never struck, so nothing is known of it");
    }
}

#[test]
fn a_seed_is_the_same_history_in_every_process() {
    let simulate = |seed: u64| {
        let output = Command::new(env!("CARGO_BIN_EXE_simulate")).arg(seed.to_string()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    for seed in 100..106 {
        let (one, other) = (simulate(seed), simulate(seed));
        assert!(one.contains("log hash"), "{one}");
        assert_eq!(one, other, "seed {seed}");
    }
}

/// Looks for a seed that finds the defect.
fn find(defect: Defect) {
    for seed in 0..SEEDS_PER_DEFECT {
        let options = Options {
            defect: Some(defect),
            ..Options::default()
        };
        if let Some(violation) = run(seed, options).violation {
            println!("{defect:?}: found by seed {seed}, which breaks: {}", violation.rule);
            return;
        }
    }
    panic!("{defect:?} was not found in {SEEDS_PER_DEFECT} seeds");
}

macro_rules! defects {
    ($($test:ident: $defect:expr,)*) => {
        $(#[test]
        fn $test() {
            find($defect);
        })*

        #[test]
        fn every_defect_has_its_test() {
            let tested = [$($defect),*];
            assert_eq!(Defect::ALL.iter().find(|defect| !tested.contains(defect)), None);
        }
    };
}

mod found {
    use evalgrid_workflow::faults::Fault;

    use super::{Defect, find};

    defects! {
        slot_released_twice: Defect::Product(Fault::SlotReleasedTwice),
        tokens_reused: Defect::Product(Fault::TokensReused),
        expiry_forgets_custody: Defect::Product(Fault::ExpiryForgetsCustody),
        steps_dropped_on_adoption: Defect::Product(Fault::StepsDroppedOnAdoption),
        keys_forgotten: Defect::Product(Fault::KeysForgotten),
        destroyed_unasked: Defect::Product(Fault::DestroyedUnasked),
        batch_ends_early: Defect::Product(Fault::BatchEndsEarly),
        absence_not_counted: Defect::Product(Fault::AbsenceNotCounted),
        old_lease_lives: Defect::Product(Fault::OldLeaseLives),
        told_before_durable: Defect::Product(Fault::ToldBeforeDurable),
        lost_lease_kept: Defect::Product(Fault::LostLeaseKept),
        time_goes_back: Defect::Product(Fault::TimeGoesBack),
        lost_ask_not_counted: Defect::Product(Fault::LostAskNotCounted),
        answer_forgotten: Defect::Product(Fault::AnswerForgotten),
        reply_forgotten: Defect::Product(Fault::ReplyForgotten),
        judged_beside_sandbox: Defect::Product(Fault::JudgedBesideSandbox),
        error_fails_trial: Defect::Product(Fault::ErrorFailsTrial),
        lost_conversation_untold: Defect::Product(Fault::LostConversationUntold),
        no_place_for_people: Defect::Product(Fault::NoPlaceForPeople),
        no_fence: Defect::NoFence,
        appended_over_hole: Defect::AppendedOverHole,
        appended_twice: Defect::AppendedTwice,
        snapshot_ahead: Defect::SnapshotAhead,
        cut_first: Defect::CutFirst,
        loss_concealed: Defect::LossConcealed,
        process_started_twice: Defect::ProcessStartedTwice,
        asked_before_durable: Defect::AskedBeforeDurable,
        asked_again_at_once: Defect::AskedAgainAtOnce,
    }
}
