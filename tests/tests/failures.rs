//! The page of failures and the tests that it names agree: every row is there, every test exists and names its row.
#![allow(clippy::unwrap_used)]

use std::{collections::BTreeSet, fs, path::Path};

/// Rows of the list, and of what judges and people add to it.
const ROWS: [(&str, u32); 2] = [("", 61), ("J", 19)];
/// Words that a failure, and what is done about it, may take: it is a page to look things up in.
const MAX_WORDS: (usize, usize) = (12, 15);

/// A number, or one behind a `J`.
fn is_row(text: &str) -> bool {
    text.strip_prefix('J').unwrap_or(text).parse::<u32>().is_ok()
}

/// The rows that a text cites: they stand behind the word, with commas between.
fn cited(text: &str) -> BTreeSet<String> {
    let mut rows = BTreeSet::new();
    for behind in text.split("catalogue ").skip(1) {
        for word in behind.split_whitespace() {
            let row = word.trim_end_matches([',', ':', '.', ';']);
            if !is_row(row) {
                break;
            }
            rows.insert(row.to_owned());
            if !word.ends_with(',') {
                break;
            }
        }
    }
    rows
}

/// A test with what is written right above it and in it; why not, where there is none of this name.
fn test_text(source: &str, name: &str) -> Result<String, String> {
    let lines: Vec<&str> = source.lines().collect();
    let start = lines
        .iter()
        .position(|line| line.trim_start().trim_start_matches("async ").starts_with(&format!("fn {name}(")))
        .ok_or("there is no function of this name")?;
    let above = |line: &&&str| line.trim_start().starts_with(['#', '/']);
    let head = lines[..start].iter().rev().take_while(above).count();
    let is_test = lines[start - head..start]
        .iter()
        .any(|line| line.contains("#[test]") || line.contains("#[tokio::test"));
    if !is_test {
        return Err("it is no test".into());
    }
    let indent = lines[start].len() - lines[start].trim_start().len();
    let end = format!("{}}}", " ".repeat(indent));
    let body = lines[start..].iter().take_while(|line| **line != end).count();
    Ok(lines[start - head..start + body].join("\n"))
}

/// What is wrong with the page, if anything.
fn problems(page: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut problems = Vec::new();
    let mut seen = BTreeSet::new();
    for line in page.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let row = cells[0];
        if !line.starts_with('|') || !is_row(row) {
            continue;
        }
        if !seen.insert(row.to_owned()) {
            problems.push(format!("row {row} is there twice"));
        }
        let [_, failure, done, tests] = cells[..] else {
            problems.push(format!("row {row} does not have four cells"));
            continue;
        };
        for (text, most) in [(failure, MAX_WORDS.0), (done, MAX_WORDS.1)] {
            if !(1..=most).contains(&text.split_whitespace().count()) {
                problems.push(format!("row {row}: {text:?} has no word, or more than {most}"));
            }
        }
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        if named.is_empty() && tests.strip_prefix("not applicable: ").is_none_or(str::is_empty) {
            problems.push(format!("row {row} names neither a test nor a reason why there is none"));
        }
        for test in named {
            let (path, name) = test.split_once("::").unwrap_or((test, ""));
            let found = read(path).ok_or_else(|| "there is no such file".to_owned());
            match found.and_then(|source| test_text(&source, name)) {
                Err(why) => problems.push(format!("row {row}: {test}: {why}")),
                Ok(text) if !cited(&text).contains(row) => problems.push(format!("row {row}: {test} does not say \"catalogue {row}\"")),
                Ok(_) => {}
            }
        }
    }
    let all = ROWS
        .iter()
        .flat_map(|(kind, rows)| (1..=*rows).map(move |row| format!("{kind}{row}")));
    let missing = all.filter(|row| !seen.contains(row));
    problems.extend(missing.map(|row| format!("row {row} is missing")));
    problems
}

#[test]
fn every_row_has_its_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = fs::read_to_string(root.join("docs/failures.md")).unwrap();
    let problems = problems(&page, |path| fs::read_to_string(root.join(path)).ok());
    assert!(problems.is_empty(), "docs/failures.md:\n{}", problems.join("\n"));
}

#[test]
fn what_is_missing_is_found() {
    let source = "/// catalogue 1, J2, 2: so.\n#[test]\nfn good() {\n    // catalogue 3: there.\n}\n\n/// catalogue 4.\nfn helper() {}\n\n#[test]\nfn bare() {\n}\n";
    let read = |path: &str| (path == "a.rs").then(|| source.to_owned());
    let check = |row: &str, expected: &str| {
        let found = problems(row, read);
        let other: Vec<_> = found.iter().filter(|problem| !problem.ends_with("is missing")).collect();
        match expected {
            "" => assert_eq!(other, [""; 0], "{row}"),
            _ => assert!(other.len() == 1 && other[0].contains(expected), "{row}: {other:?}"),
        }
    };
    for row in ["1", "2", "3", "J2"] {
        check(&format!("| {row} | a | b | `a.rs::good` |"), "");
    }
    check("| 4 | a | b | `a.rs::good` |", "does not say \"catalogue 4\"");
    check("| J1 | a | b | `a.rs::good` |", "does not say \"catalogue J1\"");
    check("| 3 | a | b | `a.rs::bare` |", "does not say");
    check("| 4 | a | b | `a.rs::helper` |", "no test");
    check("| 1 | a | b | `a.rs::gone` |", "no function");
    check("| 1 | a | b | `b.rs::good` |", "no such file");
    check("| 1 | a | b | not applicable: no such thing |", "");
    check("| 1 | a | b | later |", "neither a test nor a reason");
    check("| 1 | a | | `a.rs::good` |", "four cells");
    check(&format!("| 1 |{} | b | `a.rs::good` |", " word".repeat(13)), "more than 12");
    check("| 1 | a | b | `a.rs::good` |\n| 1 | a | b | `a.rs::good` |", "twice");
    let rows: u32 = ROWS.iter().map(|(_, rows)| rows).sum();
    assert_eq!(problems("", read).len(), rows as usize, "and all rows are wanted");
}
