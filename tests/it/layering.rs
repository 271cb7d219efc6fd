//! Arrows between crates point down. The table is ARCHITECTURE.md's; the manifests are what is true.

use std::{collections::BTreeMap, fs, path::Path};

/// Crates by tier; a crate may use only crates of lower tiers. `types` may be used from any tier above.
const TIERS: &[&[&str]] = &[
    &["types", "sampler", "os", "tensor"],
    &["wire", "ring", "cpu", "cuda", "checkpoint", "scheduler"],
    &["link"],
    &["nn", "executor"],
    &["models", "engine"],
    &["worker"],
];

/// Test-only crates: nothing ships with them, they may use what they test.
const TEST_ONLY: &[&str] = &["testkit"];

/// Crates in which `unsafe` is allowed, each block with its proof; all others forbid it.
const UNSAFE_ALLOWED: &[&str] = &["os", "ring", "cpu", "cuda"];

/// The control side and the compute side meet only in the crates that both may use.
const NEVER: &[(&str, &str)] = &[
    ("executor", "worker"),
    ("executor", "models"),
    ("engine", "models"),
    ("worker", "executor"),
    ("worker", "engine"),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What each crate's manifest names under `[dependencies]`, without the `denoised-` prefix.
fn arrows() -> BTreeMap<String, Vec<String>> {
    let mut arrows = BTreeMap::new();
    for entry in fs::read_dir(root().join("crates")).expect("crates/ exists") {
        let folder = entry.expect("a readable entry").path();
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).expect("every crate has a manifest");
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        let mut section = "";
        let mut uses = Vec::new();
        for line in manifest.lines().map(str::trim) {
            if line.starts_with('[') {
                section = line;
            } else if section.contains("dependencies")
                && !section.contains("dev-dependencies")
                && let Some(used) = line.strip_prefix("denoised-")
            {
                uses.push(used.split(['.', ' ', '=']).next().unwrap_or_default().to_owned());
            }
        }
        arrows.insert(name, uses);
    }
    arrows
}

fn tier_of(name: &str) -> Option<usize> {
    TIERS.iter().position(|tier| tier.contains(&name))
}

#[test]
fn every_arrow_points_to_a_lower_tier() {
    let mut wrong = Vec::new();
    let arrows = arrows();
    for (user, uses) in &arrows {
        if TEST_ONLY.contains(&user.as_str()) {
            continue;
        }
        let Some(user_tier) = tier_of(user) else {
            wrong.push(format!(
                "{user} has no tier: add it to the table here and in ARCHITECTURE.md"
            ));
            continue;
        };
        for used in uses {
            match tier_of(used) {
                Some(used_tier) if used_tier < user_tier => {}
                Some(used_tier) => wrong.push(format!(
                    "{user} (tier {user_tier}) uses {used} (tier {used_tier})"
                )),
                None => wrong.push(format!("{user} uses {used}, which is no crate that ships")),
            }
            if NEVER.contains(&(user.as_str(), used.as_str())) {
                wrong.push(format!("{user} must not know {used}"));
            }
        }
    }
    assert!(wrong.is_empty(), "wrong arrows:\n  {}", wrong.join("\n  "));
    assert!(
        arrows.values().map(Vec::len).sum::<usize>() > 20,
        "the manifests were not read: {arrows:?}"
    );
}

#[test]
fn unsafe_code_is_forbidden_where_it_is_not_needed() {
    for name in arrows().keys() {
        let head = fs::read_to_string(root().join("crates").join(name).join("src/lib.rs"))
            .expect("every crate is a library");
        let forbids = head.contains("#![forbid(unsafe_code)]");
        assert_eq!(
            forbids,
            !UNSAFE_ALLOWED.contains(&name.as_str()),
            "crates/{name}/src/lib.rs: #![forbid(unsafe_code)]"
        );
    }
}

#[test]
fn every_crate_takes_the_workspace_lints() {
    for name in arrows().keys() {
        let manifest =
            fs::read_to_string(root().join("crates").join(name).join("Cargo.toml")).expect("a manifest");
        assert!(
            manifest.contains("[lints]\nworkspace = true"),
            "crates/{name} does not take the workspace's lints"
        );
    }
}

#[test]
fn top_level_holds_what_it_should() {
    let allowed = [
        "Cargo.toml",
        "Cargo.lock",
        "crates",
        "bin",
        "scripts",
        "tests",
        "ARCHITECTURE.md",
        "README.md",
        "CHANGELOG.md",
        "LICENSE-MIT",
        "LICENSE-APACHE",
        "target",
    ];
    for entry in fs::read_dir(root()).expect("the root is readable") {
        let name = entry
            .expect("a readable entry")
            .file_name()
            .to_string_lossy()
            .into_owned();
        assert!(
            name.starts_with('.') || allowed.contains(&name.as_str()) || name.ends_with(".png"),
            "{name} does not belong at the top level"
        );
    }
}
