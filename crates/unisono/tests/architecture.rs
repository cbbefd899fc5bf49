//! Knowledge flows one way: which crate may know which, and that the drawing of it is right.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Every crate, and those of the workspace that it may depend on: only some that stand before it.
/// Dependencies of tests do not count.
const MAY_KNOW: [(&str, &[&str]); 16] = [
    ("net", &[]),
    ("collective", &["net"]),
    ("codec", &[]),
    ("cuda", &["net", "collective", "codec"]),
    ("mpi", &["net", "collective"]),
    ("optimizer", &[]),
    ("cluster", &["net"]),
    ("sync", &["net", "collective", "codec", "optimizer"]),
    ("relaxed", &["net", "collective", "codec", "optimizer"]),
    ("insight", &[]),
    ("foresight", &["collective", "codec", "insight"]),
    ("unisono", LIBRARIES),
    ("workload", &[]),
    ("netlab", &[]),
    ("cli", &["unisono", "workload"]),
    ("python", &["unisono"]),
];

/// All libraries below the public one: what that may know, and programs as well.
const LIBRARIES: &[&str] = &[
    "net",
    "collective",
    "cuda",
    "mpi",
    "codec",
    "optimizer",
    "cluster",
    "sync",
    "relaxed",
    "insight",
    "foresight",
];

/// The section of `docs/architecture.md` that has the drawing.
const HEADING: &str = "Which crate knows which";

type Edges = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_crate_knows_more_than_it_may() {
    for (number, (name, known)) in MAY_KNOW.iter().enumerate() {
        let before: Vec<&str> = MAY_KNOW[..number].iter().map(|(name, _)| *name).collect();
        assert!(known.iter().all(|known| before.contains(known)), "{name} stands too early");
    }
    for (name, knows) in edges() {
        let row = MAY_KNOW.iter().find(|(listed, _)| *listed == name);
        let (_, may) = row.unwrap_or_else(|| panic!("crates/{name} has no row in MAY_KNOW"));
        let is_program = ["cli", "python"].contains(&&*name);
        for known in knows {
            let allowed = may.contains(&&*known) || is_program && LIBRARIES.contains(&&*known);
            assert!(allowed, "crates/{name} depends on crates/{known}, which it must not know");
        }
    }
}

#[test]
fn the_drawing_is_right() {
    let document = std::fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let section = document.split("\n## ").find(|section| section.starts_with(HEADING));
    let lines = section.expect("the section of the drawing").lines().map(str::trim);
    let drawn: BTreeSet<String> =
        lines.filter(|line| line.contains(" --> ")).map(Into::into).collect();
    let edges = edges();
    let mut expected = BTreeSet::new();
    for (name, knows) in &edges {
        // What is known through another needs no arrow.
        let through = |known: &&String| knows.iter().any(|other| reaches(&edges, other, known));
        let direct = knows.iter().filter(|known| !through(known));
        expected.extend(direct.map(|known| format!("{name} --> {known}")));
    }
    let expected_text: String = expected.iter().map(|line| format!("    {line}\n")).collect();
    assert!(drawn == expected, "docs/architecture.md should draw\n{expected_text}");
}

/// Whether a crate knows another, itself or through others.
fn reaches(edges: &Edges, from: &str, to: &str) -> bool {
    let knows = edges.get(from).into_iter().flatten();
    knows.into_iter().any(|known| known == to || reaches(edges, known, to))
}

/// Every crate of the workspace, by its folder, and those it depends on.
fn edges() -> Edges {
    let mut manifests = BTreeMap::new();
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        let entry = entry.unwrap();
        let Ok(text) = std::fs::read_to_string(entry.path().join("Cargo.toml")) else { continue };
        let manifest: toml::Table = text.parse().unwrap();
        manifests.insert(entry.file_name().into_string().unwrap(), manifest);
    }
    let package = |manifest: &toml::Table| manifest["package"]["name"].as_str().map(str::to_owned);
    let folders: BTreeMap<String, &String> =
        manifests.iter().map(|(folder, it)| (package(it).unwrap(), folder)).collect();
    let known = |manifest: &toml::Table| {
        dependencies(manifest).filter_map(|name| folders.get(name)).map(|f| f.to_string()).collect()
    };
    manifests.iter().map(|(folder, manifest)| (folder.clone(), known(manifest))).collect()
}

/// The names of what a crate depends on, on any system, to be built or to build.
fn dependencies(manifest: &toml::Table) -> impl Iterator<Item = &str> {
    let systems = manifest.get("target").and_then(toml::Value::as_table);
    let systems = systems.into_iter().flat_map(|all| all.values().filter_map(|it| it.as_table()));
    let tables = std::iter::once(manifest).chain(systems);
    let kinds =
        tables.flat_map(|it| ["dependencies", "build-dependencies"].map(|kind| it.get(kind)));
    kinds.flatten().filter_map(toml::Value::as_table).flatten().map(|(name, dependency)| {
        dependency.get("package").and_then(toml::Value::as_str).unwrap_or(name)
    })
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
