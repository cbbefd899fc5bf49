//! The kernels of codecs, compiled for the host: a library for each family.

use std::path::{Path, PathBuf};
use std::process::Command;

const FAMILIES: [&str; 7] = ["cast", "quantize", "sign", "topk", "randk", "powersgd", "scale"];

/// Compiles those whose sources have changed into a folder.
pub fn compile_into(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources: Vec<PathBuf> = ["blocks.cpp", "block.h", "host.h"]
        .map(|name| root.join("tests/without_device").join(name))
        .into();
    for entry in std::fs::read_dir(root.join("kernels")).unwrap() {
        sources.push(entry.unwrap().path());
    }
    std::thread::scope(|scope| {
        for family in FAMILIES {
            let sources = &sources;
            scope.spawn(move || {
                let kernels = root.join(format!("kernels/{family}.cu"));
                let kernels = format!("-DKERNELS=\"{}\"", kernels.display());
                let library = folder.join(format!("{family}.so"));
                compile(&sources[0], sources, &library, &kernels);
            });
        }
    });
}

/// Compiles a source to a library, if one of all sources has changed since it was.
pub fn compile(source: &Path, all: &[PathBuf], library: &Path, kernels: &str) {
    let written = |path: &Path| std::fs::metadata(path).and_then(|it| it.modified()).ok();
    if written(library) > all.iter().filter_map(|path| written(path)).max() {
        return;
    }
    let made = library.with_extension(format!("{}.made", std::process::id()));
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-pthread"]);
    // Jumps from stack to stack are no mistake here.
    compiler.arg("-U_FORTIFY_SOURCE").arg(kernels).arg(source).arg("-o").arg(&made).arg("-ldl");
    let status = compiler.status().expect("a C++ compiler, which the kernels' tests need as well");
    assert!(status.success(), "{} does not compile for the host", source.display());
    std::fs::rename(&made, library).unwrap();
}
