//! Alone in its process, because it looks at the process's CPU time.

use denoised_cpu::{CpuBackend, CpuOptions};
use denoised_tensor::{Backend, DType};
use std::time::Duration;

#[test]
fn idle_backends_use_no_cpu_and_end_without_a_trace() {
    let options = CpuOptions {
        n_threads: 4,
        ..CpuOptions::default()
    };
    let backends: Vec<CpuBackend> = (0..3)
        .map(|_| CpuBackend::new(options).expect("threads"))
        .collect();
    for backend in &backends {
        let x = backend.alloc(&[1000, 1000], DType::F32).expect("4 MB");
        backend.fill(&x, 1.0).expect("a fresh tensor");
        backend
            .add(
                &x,
                &x.narrow(0, 0, 1).expect("inside"),
                &backend.alloc(&[1000, 1000], DType::F32).expect("4 MB"),
            )
            .expect("shapes that fit");
    }
    let pid = std::process::id();
    let used_ns = || denoised_os::process::cpu_time_ns(pid).expect("this process");
    let before_ns = used_ns();
    std::thread::sleep(Duration::from_millis(400));
    let idle_ns = used_ns() - before_ns;
    assert!(
        idle_ns < 40_000_000,
        "{idle_ns} ns of CPU time in 400 ms of idling"
    );
    let n_threads = || std::fs::read_dir("/proc/self/task").expect("Linux").count();
    let with_pools = n_threads();
    drop(backends);
    // A joined thread may stay listed for a moment.
    for _ in 0..1000 {
        if n_threads() == with_pools - 9 {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} threads of {with_pools} are left", n_threads());
}
