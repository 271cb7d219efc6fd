//! No fault case is missing: each has tests that begin with its id, and a guard file that shows what they are there for.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Cases that systems of this kind got wrong, by kind; those that have no test yet say what they wait for.
const CASES: &[(&str, &[&str])] = &[
    ("worker death and hangs", &["D1", "D3", "D5", "D7"]),
    ("orphans and parent death", &["O1", "O3", "O5", "O7"]),
    ("shutdown and signals", &["S1", "S3", "S5", "S7"]),
    ("start-up and readiness", &["R1", "R3", "R5"]),
    ("shared memory", &["M1", "M3", "M5", "M7"]),
    ("ring and queue", &["Q1", "Q3", "Q5", "Q7", "Q9"]),
    ("oversized messages", &["L1", "L3", "L5"]),
    ("stale, swapped or misrouted replies", &["C1", "C3", "C5", "C7"]),
    ("timeouts and deadlines", &["T1", "T3", "T5"]),
    ("errors swallowed or unclear", &["E1", "E3", "E5", "E7"]),
    ("deferred output", &["P1", "P3", "P5"]),
    ("abort and cancel", &["K1", "K3", "K5", "K7"]),
    ("ports and rendezvous", &["N1", "N3"]),
    ("device memory, sleep and wake", &["G1", "G3", "G5"]),
    ("weight update and control", &["X1", "X3", "X5"]),
    ("selection, identity, environment", &["I1", "I3", "I5"]),
];
const WAITING: &[(&str, &str)] = &[
    ("P1", "there is no sleep"),
    ("N1", "worlds of one machine need no ports"),
    ("N3", "worlds of one machine need no ports"),
    ("G3", "there is no wake"),
    ("G5", "there is no sleep"),
    ("X1", "there is no update of weights"),
    ("X3", "there is no pause"),
];

/// Where tests of cases are.
const PLACES: [&str; 5] = [
    "crates/executor/tests",
    "crates/engine/tests",
    "crates/ring/tests",
    "crates/testkit/src/suites",
    "tests/it",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            found.append(&mut sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// `Q7` of `q7_idle_workers`; nothing of names that do not begin like a case.
fn case_of(name: &str) -> Option<String> {
    let (id, _) = name.split_once('_')?;
    let mut chars = id.chars();
    let is_id = chars.next()?.is_ascii_lowercase() && !chars.as_str().is_empty();
    (is_id && chars.all(|c| c.is_ascii_digit())).then(|| id.to_uppercase())
}

/// The tests by case: functions with `#[test]` before them, and those of suites.
fn tests() -> BTreeMap<String, Vec<String>> {
    let mut tests: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for place in PLACES {
        let is_suite = place.ends_with("suites");
        for source in sources(&root().join(place)) {
            let text = fs::read_to_string(&source).expect("a readable source");
            let mut is_test = false;
            for line in text.lines() {
                let line = line.trim();
                let code = line.strip_prefix("pub ").unwrap_or(line);
                let Some((name, _)) = code.strip_prefix("fn ").and_then(|code| code.split_once('(')) else {
                    // Other attributes may stand between the two.
                    is_test = line == "#[test]" || is_test && line.starts_with('#');
                    continue;
                };
                if let Some(id) = case_of(name)
                    && (is_test || is_suite)
                {
                    let name = format!("{}: {name}", source.display());
                    tests.entry(id).or_default().push(name);
                }
                is_test = false;
            }
        }
    }
    tests
}

#[test]
fn every_case_has_a_test_or_says_what_it_waits_for() {
    let all: BTreeSet<&str> = CASES.iter().flat_map(|(_, ids)| *ids).copied().collect();
    let waiting: BTreeMap<&str, &str> = WAITING.iter().copied().collect();
    assert_eq!(
        (all.len(), waiting.len()),
        (56, 7),
        "an id is there twice, or a case came"
    );
    let tests = tests();
    let mut wrong = Vec::new();
    for id in &all {
        match (tests.get(*id), waiting.get(id)) {
            (None, None) => wrong.push(format!(
                "{id} has no test whose name begins with `{}_`",
                id.to_lowercase()
            )),
            (Some(tests), Some(reason)) => wrong.push(format!("{id} waits ({reason}), but has {tests:?}")),
            (Some(_), None) | (None, Some(_)) => {}
        }
    }
    let unknown = tests.keys().filter(|id| !all.contains(id.as_str()));
    wrong.extend(unknown.map(|id| format!("{id} is no case: {:?}", tests[id])));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A text without its blanks and line breaks: edits outlive a change of format.
fn squeezed(text: &str) -> String {
    text.split_ascii_whitespace().collect()
}

#[test]
fn every_case_has_a_guard_that_is_still_there() {
    let folder = root().join("tests/guards");
    let waiting: BTreeSet<&str> = WAITING.iter().map(|(id, _)| *id).collect();
    let cases = CASES.iter().flat_map(|(_, ids)| *ids).copied();
    let wanted: BTreeSet<String> = cases
        .filter(|id| !waiting.contains(id))
        .map(|id| format!("{id}.guard"))
        .collect();
    let entries = fs::read_dir(&folder).expect("tests/guards");
    let found: BTreeSet<String> = entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    assert_eq!(found, wanted);
    let mut wrong = Vec::new();
    for file in &found {
        let text = fs::read_to_string(folder.join(file)).expect("a readable guard");
        let id = file.trim_end_matches(".guard").to_lowercase();
        let mut n_runs = 0;
        // Where the present edit is made, and what goes.
        let mut edits: Vec<(String, String)> = Vec::new();
        for line in text.lines() {
            let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
            match kind {
                "run" => {
                    n_runs += 1;
                    if !rest.contains(&format!("{id}_")) {
                        wrong.push(format!("{file}: `{line}` does not run the tests of this case"));
                    }
                }
                "in" => edits.push((rest.to_owned(), String::new())),
                "-" => match edits.last_mut() {
                    Some((_, goes)) => goes.push_str(&squeezed(rest)),
                    None => wrong.push(format!("{file}: `{line}` is in no file")),
                },
                _ => {}
            }
        }
        if n_runs == 0 || edits.is_empty() {
            wrong.push(format!("{file}: nothing to run or nothing to edit"));
        }
        for (place, goes) in edits {
            let text = squeezed(&fs::read_to_string(root().join(&place)).unwrap_or_default());
            let n_found = text.matches(&goes).count();
            if n_found != 1 {
                wrong.push(format!("{file}: `{goes}` is {n_found} times in {place}"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "guards that `scripts/check-guards` cannot remove any more:\n{}",
        wrong.join("\n")
    );
}
