//! What is read by the page comes out whole, however it falls onto the pages.
#![allow(clippy::unwrap_used)]

mod redis_support;

use evalgrid_store::{Log as _, Record, Replay, Snapshot};
use redis_support::{Owned, Server, store, take};

/// Bytes that no compression makes smaller.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..length).map(|_| next()).collect()
}

fn append(owned: &mut Owned, sequence: u64, bytes: usize) {
    let record = Record {
        partition: 1,
        sequence,
        payload: noise(sequence, bytes).into(),
    };
    owned.log.append(&[record]).unwrap();
}

/// Appends up to each of the counts. Each time somebody reads all from the start, and somebody goes on from the last time.
fn check(bytes: usize, counts: &[u64]) {
    let server = Server::start(&[]);
    let cell = store(&server.url(), "cell");
    let (mut owned, _) = take(&cell);
    let (mut goes_on, mut last) = (cell.follow(), 0);
    let mut written = 0;
    for count in counts {
        while written < *count {
            written += 1;
            append(&mut owned, written, bytes);
        }
        let visit = |last: &mut u64, replay: Replay<'_>| match replay {
            Replay::Record(position, record) => {
                *last += 1;
                assert_eq!((position, record.sequence), (*last, *last));
                assert!(record.payload == noise(position, bytes), "record {position} of {count}");
                Ok(())
            }
            Replay::Snapshot(_) => Err("there is none".into()),
        };
        let mut anew = 0;
        let followed = cell.follow().poll(|replay| visit(&mut anew, replay)).unwrap();
        assert_eq!((anew, followed.position), (*count, *count), "from the start, {bytes} bytes each");
        goes_on.poll(|replay| visit(&mut last, replay)).unwrap();
        assert_eq!(last, *count, "from the last time, {bytes} bytes each");
    }
}

/// catalogue 10: a page has 256 entries at most.
#[test]
fn pages_full_of_entries_lose_none() {
    check(16, &[1, 255, 256, 257, 511, 512, 513, 768, 1025]);
}

/// catalogue 10: a page takes no further entry after 2 MiB.
#[test]
fn pages_full_of_bytes_lose_none() {
    check(512 * 1024 - 64, &[1, 3, 4, 5, 7, 8, 9, 13]);
    check(2 * 1024 * 1024 + 1, &[1, 2, 3]);
}

/// catalogue 10: a snapshot lies there in chunks of 256 KiB, read eight at a time.
#[test]
fn snapshots_of_any_number_of_chunks_come_back_whole() {
    let server = Server::start(&[]);
    let cell = store(&server.url(), "cell");
    let (mut owned, _) = take(&cell);
    let mut position = 0;
    for chunks in [0, 1, 7, 8, 9, 16] {
        // Whatever the framing adds, one of these fills its last chunk to the brim.
        for beside in [-96i64, -64, -48, -32, -24, -16, -8, 0, 1] {
            let Ok(bytes) = usize::try_from(chunks * 256 * 1024 + beside) else {
                continue;
            };
            position += 1;
            append(&mut owned, position, 8);
            let payload = noise(position, bytes);
            let saved = Snapshot {
                position,
                sequences: vec![0, position],
                payload: payload.clone().into(),
            };
            owned.log.snapshots().save(&saved).unwrap();
            let mut found = None;
            let visit = |replay: Replay<'_>| {
                if let Replay::Snapshot(snapshot) = replay {
                    found = Some(snapshot.clone());
                }
                Ok(())
            };
            cell.follow().poll(visit).unwrap();
            assert!(found == Some(saved), "a snapshot of {bytes} bytes");
        }
    }
}
