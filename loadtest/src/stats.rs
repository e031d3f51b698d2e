//! Medians, percentiles, and what a disk has written.

use std::{path::Path, time::Duration};

/// The middle of some figures.
pub fn median(figures: &[f64]) -> f64 {
    percentile(figures, 0.5)
}

/// The figure below which the given part of them lies.
pub fn percentile(figures: &[f64], part: f64) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        length => sorted[(((length - 1) as f64) * part).round() as usize],
    }
}

/// Durations in milliseconds.
pub fn milliseconds(durations: &[Duration]) -> Vec<f64> {
    durations.iter().map(|duration| duration.as_secs_f64() * 1e3).collect()
}

/// Bytes written so far to the disk under a folder, whoever wrote them.
pub fn bytes_at_device(folder: &Path) -> u64 {
    let device = rustix::fs::stat(folder).unwrap().st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let table = std::fs::read_to_string("/proc/diskstats").unwrap();
    let line = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|fields| fields[0] == major.to_string() && fields[1] == minor.to_string());
    // The tenth field counts sectors of 512 bytes.
    line.map_or(0, |fields| fields[9].parse::<u64>().unwrap() * 512)
}
