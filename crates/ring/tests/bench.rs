//! The measurements work; their figures are for people to read.

use denoised_ring::bench::{self, Launcher, Plan};

#[test]
#[expect(clippy::exit, reason = "the other end's part ends its process")]
fn child_main() {
    if std::env::var_os("DENOISED_RING_BENCH_TEST").is_some() {
        bench::child_main().unwrap();
        std::process::exit(0);
    }
}

#[test]
fn every_figure_is_measured_and_no_wake_is_missed() {
    // The launcher starts `env`, because this program's only way to know its part is a variable.
    let this_program = std::env::current_exe().unwrap();
    let launcher = Launcher {
        program: "/usr/bin/env".into(),
        args: vec![
            "DENOISED_RING_BENCH_TEST=1".into(),
            this_program.into(),
            "--exact".into(),
            "child_main".into(),
        ],
    };
    let plan = Plan {
        n_rounds: 3,
        n_records: 10_000,
        n_repeats: 1,
        idle_s: 1,
    };
    let report = bench::run(&launcher, &plan).unwrap();
    for times in [
        report.line_round_trip,
        report.spinning_round_trip,
        report.futex_round_trip,
        report.sleeping_round_trip,
        report.empty_delivery,
        report.tensor_delivery,
    ] {
        assert!(
            times.n == 3 && times.p50_ns > 0 && times.p99_ns >= times.p50_ns,
            "{times:?}"
        );
    }
    assert_eq!(
        report
            .throughput
            .iter()
            .map(|throughput| throughput.n_readers)
            .collect::<Vec<_>>(),
        [1, 2, 4]
    );
    assert!(
        report
            .throughput
            .iter()
            .all(|throughput| throughput.records_per_s > 0.0)
    );
    // Far above what sleeping readers take, far below what a spinning one would.
    assert!(report.idle_core_share < 0.2, "{}", report.idle_core_share);
    assert_eq!(report.n_missed_wakes, 0);
}
