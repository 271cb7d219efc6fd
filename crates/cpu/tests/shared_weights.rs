//! Blocks of weights that were made elsewhere or otherwise are refused.

use denoised_cpu::{CpuBackend, CpuOptions, Isa};
use denoised_os::memfd::MemoryBuilder;
use denoised_tensor::{Backend, Precision, PrepareInput, TensorError, WeightKind, WeightSpec};
use denoised_testkit::suites::backend::MemorySource;
use std::os::fd::{AsFd, OwnedFd};

fn backend(isa: Isa, winograd: bool) -> CpuBackend {
    CpuBackend::new(CpuOptions {
        n_threads: 1,
        isa: Some(isa),
        winograd,
    })
    .expect("an available set")
}

fn specs() -> Vec<WeightSpec> {
    let spec = |name: &str, kind, shape: &[usize]| WeightSpec {
        sources: vec![name.to_owned()],
        kind,
        shape: shape.to_vec(),
        precision: Precision::Device,
    };
    vec![
        spec("m", WeightKind::Matrix, &[30, 20]),
        spec("c", WeightKind::Conv { stride: 1 }, &[64, 64, 3, 3]),
    ]
}

fn source() -> MemorySource {
    let mut source = MemorySource::default();
    source.insert("m", &[30, 20], &[0.5; 600]);
    source.insert("c", &[64, 64, 3, 3], &vec![0.25; 64 * 64 * 9]);
    source
}

/// Frozen memory of `len` bytes that starts with `start`.
fn frozen(start: &[u8], len: usize) -> OwnedFd {
    let mut builder = MemoryBuilder::create("test", len).expect("memory");
    let n = start.len().min(len);
    builder.bytes_mut()[..n].copy_from_slice(&start[..n]);
    let memory = builder.freeze().expect("a seal");
    memory.as_fd().try_clone_to_owned().expect("a descriptor")
}

fn refusal(backend: &CpuBackend, fd: OwnedFd) -> String {
    match backend.prepare(&specs(), PrepareInput::Shared(fd), &mut |_, _| {}) {
        Err(TensorError::SharedWeights(text)) => text,
        outcome => panic!("{outcome:?}"),
    }
}

#[test]
fn blocks_of_another_kind_are_refused_with_the_reason() {
    let best = backend(Isa::best(), true);
    let built = best
        .prepare(&specs(), PrepareInput::Build(&source()), &mut |_, _| {})
        .expect("weights");
    let shared = built.shared.as_ref().expect("shared memory");
    let copy = || shared.try_clone().expect("a descriptor");

    let reason = refusal(&backend(Isa::best(), false), copy());
    assert!(reason.contains("bytes"), "without Winograd: {reason}");
    if Isa::best() != Isa::Portable {
        let reason = refusal(&backend(Isa::Portable, true), copy());
        assert!(
            reason.contains("bytes") || reason.contains("instruction set"),
            "{reason}"
        );
    }
    let len = usize::try_from(built.n_bytes).expect("small");
    assert_eq!(refusal(&best, frozen(&[], len)), "not a block of CPU weights");
    assert!(refusal(&best, frozen(&[], len - 1)).contains("bytes"));
    assert!(refusal(&best, frozen(&[], 16)).contains("bytes"));

    // The right header, byte by byte wrong.
    let mut header = [0; 48];
    let file = std::fs::File::from(copy());
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut header, 0).expect("a header");
    best.prepare(
        &specs(),
        PrepareInput::Shared(frozen(&header, len)),
        &mut |_, _| {},
    )
    .expect("the right header");
    for position in 0..header.len() {
        let mut wrong = header;
        wrong[position] ^= 0x40;
        refusal(&best, frozen(&wrong, len));
    }
}

#[test]
fn shared_weights_cannot_be_written() {
    let best = backend(Isa::best(), true);
    let built = best
        .prepare(&specs(), PrepareInput::Build(&source()), &mut |_, _| {})
        .expect("weights");
    let file = std::fs::File::from(built.shared.expect("shared memory"));
    assert!(std::os::unix::fs::FileExt::write_at(&file, b"x", 64).is_err());
    assert!(file.set_len(0).is_err());
}
