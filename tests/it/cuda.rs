//! Workers on CUDA devices: the real programs and processes, on the stand-in for CUDA's libraries.

use crate::support::{
    Outcome, Running, case, children_of, copy_of, decode, demo_model, denoised, is_alive, send,
};
use denoised_engine::{Engine, EngineHandle, EngineOptions, RequestEvent, RequestPolicy, SubmitOptions};
use denoised_executor::{Executor, Limits, MpExecutor, MpOptions};
use denoised_testkit::standin::{self, Schedule, Standin};
use denoised_types::{Failure, FailureCode, GenerateRequest, WorkerConfig};
use rustix::process::Signal;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A run that takes longer is killed and fails its test. The stand-in computes what a GPU would on a thread or two: minutes for the
/// slowest case.
const LIMIT: Duration = Duration::from_secs(1500);
/// Time for a worker to answer on its control lane.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Runs `denoised` with `args` on fake devices.
#[track_caller]
fn run_on(standin: &Standin, folder: &Path, args: &[&str]) -> Outcome {
    let mut command = denoised(folder);
    command.envs(standin.env()).args(args);
    Running::start(command, b"").finish_within(LIMIT)
}

macro_rules! verify_tests {
    ($($test:ident: $case:literal, $dtype:literal, $schedule:ident;)+) => {$(
        #[test]
        fn $test() {
            verify($case, $dtype, Schedule::$schedule);
        }
    )+};
}

verify_tests! {
    sd35m_in_f32_with_late_copies: "sd35m", "f32", LateForward;
    sd35m_in_f32_with_early_copies: "sd35m", "f32", EarlyReverse;
    sd35m_in_bf16_with_late_copies: "sd35m", "bf16", LateForward;
    sd35m_in_bf16_with_early_copies: "sd35m", "bf16", EarlyReverse;
    sd15_in_f32_with_late_copies: "sd15", "f32", LateForward;
    sd15_in_f32_with_early_copies: "sd15", "f32", EarlyReverse;
    sd15_in_bf16_with_late_copies: "sd15", "bf16", LateForward;
    sd15_in_bf16_with_early_copies: "sd15", "bf16", EarlyReverse;
    sd3_in_f32_with_late_copies: "sd3", "f32", LateForward;
    sd3_in_f32_with_early_copies: "sd3", "f32", EarlyReverse;
    sd3_in_bf16_with_late_copies: "sd3", "bf16", LateForward;
    sd3_in_bf16_with_early_copies: "sd3", "bf16", EarlyReverse;
    // Further families have the same kernels, which both schedules have seen above.
    dit_in_f32: "dit", "f32", EarlyReverse;
    dit_in_bf16: "dit", "bf16", LateForward;
    sdxl_in_f32: "sdxl", "f32", EarlyReverse;
    sdxl_in_bf16: "sdxl", "bf16", LateForward;
    pixart_in_f32: "pixart", "f32", EarlyReverse;
    pixart_in_bf16: "pixart", "bf16", LateForward;
    zimage_in_f32: "zimage", "f32", EarlyReverse;
    zimage_in_bf16: "zimage", "bf16", LateForward;
    qwen_image_in_f32: "qwen-image", "f32", EarlyReverse;
    qwen_image_in_bf16: "qwen-image", "bf16", LateForward;
    flux_dev_in_f32: "flux-dev", "f32", EarlyReverse;
    flux_dev_in_bf16: "flux-dev", "bf16", LateForward;
    flux_schnell_in_f32: "flux-schnell", "f32", EarlyReverse;
    flux_schnell_in_bf16: "flux-schnell", "bf16", LateForward;
    flux2_klein_in_f32: "flux2-klein", "f32", EarlyReverse;
    flux2_klein_in_bf16: "flux2-klein", "bf16", LateForward;
    wan21_t2v_in_f32: "wan21-t2v", "f32", EarlyReverse;
    wan21_t2v_in_bf16: "wan21-t2v", "bf16", LateForward;
    wan21_i2v_in_f32: "wan21-i2v", "f32", EarlyReverse;
    wan21_i2v_in_bf16: "wan21-i2v", "bf16", LateForward;
    wan22_t2v_in_f32: "wan22-t2v", "f32", EarlyReverse;
    wan22_t2v_in_bf16: "wan22-t2v", "bf16", LateForward;
    wan22_ti2v_i2v_in_f32: "wan22-ti2v-i2v", "f32", EarlyReverse;
    wan22_ti2v_i2v_in_bf16: "wan22-ti2v-i2v", "bf16", LateForward;
    // Pictures to begin with, to paint over, to edit.
    sdxl_inpaint_in_f32: "sdxl-inpaint", "f32", EarlyReverse;
    sdxl_inpaint_in_bf16: "sdxl-inpaint", "bf16", LateForward;
    sd3_img2img_in_f32: "sd3-img2img", "f32", EarlyReverse;
    sd3_img2img_in_bf16: "sd3-img2img", "bf16", LateForward;
    flux_inpaint_in_f32: "flux-inpaint", "f32", EarlyReverse;
    flux_inpaint_in_bf16: "flux-inpaint", "bf16", LateForward;
    flux2_edit_two_in_f32: "flux2-edit-two", "f32", EarlyReverse;
    flux2_edit_two_in_bf16: "flux2-edit-two", "bf16", LateForward;
}

fn verify(name: &str, dtype: &str, schedule: Schedule) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = case(name);
    let case = case.to_str().expect("a readable path");
    let args = [
        "verify",
        case,
        "--device",
        "cuda",
        "--dtype",
        dtype,
        "--workers",
        "2",
        "--json",
    ];
    let outcome = run_on(&Standin::new(schedule), folder.path(), &args).expect_code(0);
    let document = outcome.json_lines().remove(0);
    assert_eq!(document["ok"], true, "{document}");
    assert_eq!(document["dtype"], dtype);
    let names: Vec<&str> = document["devices"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|device| device["name"].as_str())
        .collect();
    assert_eq!(names, ["cuda:0", "cuda:1"]);
    // Both ranks have the same kernels: a tensor has one digest.
    let tensors = document["tensors"].as_array().expect("a list");
    assert!(tensors.len() >= 12 && tensors.iter().all(|tensor| tensor["sha256"].is_string()));
}

#[test]
fn a_case_among_others_stays_within_the_limits_in_mode_step() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = case("sd35m");
    let case = case.to_str().expect("a readable path");
    let args = [
        "verify", case, "--device", "cuda:0", "--share", "4", "--mode", "step", "--json",
    ];
    let outcome = run_on(&Standin::new(Schedule::EarlyReverse), folder.path(), &args).expect_code(0);
    let document = outcome.json_lines().remove(0);
    assert_eq!(
        (&document["ok"], &document["dtype"]),
        (&true.into(), &"f32".into())
    );
}

#[test]
fn generate_takes_bf16_and_tells_which_device_made_each_picture() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let standin = Standin::default();
    let args = [
        "generate",
        "a red apple",
        "--seed",
        "1",
        "--steps",
        "1",
        "--n",
        "2",
        "--workers",
        "2",
        "--device",
        "auto",
    ];
    let outcome = run_on(&standin, folder.path(), &[&args[..], &["--json"]].concat()).expect_code(0);
    for line in outcome.json_lines() {
        let rank = line["rank"].as_u64().expect("a rank");
        assert_eq!(line["device"], format!("cuda:{rank}"));
        assert_eq!(line["dtype"], "bf16");
        assert!(line["device_reason"].is_null());
    }
    let outcome = run_on(&standin, folder.path(), &args).expect_code(0);
    for word in ["device cuda:0", "cuda:1", "bf16"] {
        assert!(outcome.stderr.contains(word), "{}", outcome.stderr);
    }
}

#[test]
fn more_workers_than_devices_are_refused_with_both_numbers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let args = ["generate", "p", "--workers", "3", "--device", "cuda"];
    let outcome = run_on(&Standin::default(), folder.path(), &args).expect_code(7);
    for word in ["3 workers", "there are 2", "--device cuda:0"] {
        assert!(outcome.stderr.contains(word), "{}", outcome.stderr);
    }
}

// ---- what half precision cannot hold ----

/// A copy of the case `sd15`'s model in which `change` was done to the bits of every element of an f16 tensor of the autoencoder.
fn changed_autoencoder(to: &Path, tensor: &str, change: impl Fn(u16) -> u16) {
    copy_of(&case("sd15").join("model"), to);
    let file = to.join("vae/diffusion_pytorch_model.safetensors");
    let mut bytes = fs::read(&file).expect("readable");
    let n_header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n_header]).expect("JSON");
    assert_eq!(header[tensor]["dtype"], "F16");
    let [begin, end] =
        [0, 1].map(|i| header[tensor]["data_offsets"][i].as_u64().expect("an offset") as usize);
    for pair in bytes[8 + n_header..][begin..end].chunks_exact_mut(2) {
        let bits = change(u16::from_le_bytes([pair[0], pair[1]]));
        pair.copy_from_slice(&bits.to_le_bytes());
    }
    fs::write(file, bytes).expect("written");
}

fn generate_small(standin: &Standin, folder: &Path, more: &[&str]) -> Outcome {
    let args = [
        "generate",
        "a cat",
        "--model",
        "model",
        "--seed",
        "1",
        "--steps",
        "2",
        "--size",
        "32x32",
        "--output",
        "picture.png",
    ];
    run_on(standin, folder, &[&args[..], more].concat())
}

#[test]
fn a_decoder_that_overflows_f16_makes_the_picture_of_f32() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // 65536 times as much, where the number is no subnormal one.
    changed_autoencoder(
        &folder.path().join("model"),
        "decoder.conv_in.weight",
        |bits| match bits & 0x7c00 {
            0 => bits,
            _ => bits + (16 << 10),
        },
    );
    let mut pictures = Vec::new();
    for device in [
        &["--device", "cuda:0", "--dtype", "f16"][..],
        &["--device", "cpu"],
    ] {
        let outcome = generate_small(&Standin::default(), folder.path(), device).expect_code(0);
        let is_told = outcome.stderr.contains("decoding gave NaN or infinity in f16");
        assert_eq!(is_told, device.contains(&"f16"), "{}", outcome.stderr);
        let path = folder.path().join("picture.png");
        pictures.push(decode(&fs::read(&path).expect("a picture")).rgb);
        fs::remove_file(path).expect("it is there");
    }
    // What f16 made of text and steps differs by less than one shade of 256 in the mean.
    let [in_f16, in_f32] = &pictures[..] else {
        panic!("two pictures")
    };
    let differences = in_f16.iter().zip(in_f32).map(|(a, b)| u64::from(a.abs_diff(*b)));
    assert!(in_f16.len() == in_f32.len() && differences.sum::<u64>() < in_f32.len() as u64);
    assert!(in_f32.iter().any(|shade| *shade > 100) && in_f32.iter().any(|shade| *shade < 60));
}

#[test]
fn a_decoder_that_makes_nan_in_f32_is_an_error_and_no_picture() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    changed_autoencoder(&folder.path().join("model"), "decoder.conv_out.bias", |_| 0x7e00);
    for device in [
        &["--device", "cuda:0", "--dtype", "f16"][..],
        &["--device", "cpu"],
    ] {
        let outcome = generate_small(&Standin::default(), folder.path(), device);
        assert_ne!(outcome.code(), Some(0));
        assert!(
            outcome.stderr.contains("NaN or infinite after decoding"),
            "{}",
            outcome.stderr
        );
        let n_files = fs::read_dir(folder.path()).expect("a readable folder").count();
        assert_eq!(n_files, 1, "there is the model and nothing else");
    }
}

// ---- processes that die ----

#[test]
fn a_worker_killed_while_its_device_is_busy_ends_the_command_and_the_other_worker() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let standin = Standin {
        more: vec![("FAKECUDA_DELAY_US", "500".to_owned())],
        ..Standin::default()
    };
    let mut command = denoised(folder.path());
    command.envs(standin.env()).args([
        "generate",
        "--prompts",
        "-",
        "--steps",
        "1000",
        "--seed",
        "1",
        "--workers",
        "2",
        "--device",
        "cuda",
        "--json",
        "-v",
    ]);
    let n_prompts = 4;
    let mut running = Running::start(command, "a rocket\n".repeat(n_prompts).as_bytes());
    running.wait_for_stderr("begun on rank 0");
    running.wait_for_stderr("begun on rank 1");
    let workers = children_of(running.pid());
    assert_eq!(workers.len(), 2, "{workers:?}");
    send(Signal::KILL, workers[1]);
    let outcome = running.finish().expect_code(5);
    let lines = outcome.json_lines();
    assert_eq!(lines.len(), n_prompts, "{lines:?}");
    for line in &lines {
        let message = line["error"]["message"].as_str().expect("a message");
        assert!(
            message.contains("SIGKILL") && message.contains("rank"),
            "{message}"
        );
    }
    assert!(
        workers.iter().all(|&worker| !is_alive(worker)),
        "a worker outlived its supervisor"
    );
    let n_files = fs::read_dir(folder.path()).expect("a readable folder").count();
    assert_eq!(n_files, 0, "files are left");
}

// ---- memory and faults of the device ----

/// Of a fake device: room for the model, the workspace of products and a small picture, not for the first features of a large one
/// (2 x 512 x 512 x 64 floats, which are 128 MiB).
const DEVICE_BYTES: u64 = 96 << 20;
const SMALL_PX: u32 = 32;
const LARGE_PX: u32 = 1024;

/// One worker with the U-Net of the case `sd15` on the device of `standin`.
fn start(standin: &Standin) -> (EngineHandle, Arc<MpExecutor>) {
    start_of(standin, &case("sd15").join("model"), Limits::default())
}

fn start_of(standin: &Standin, model: &Path, limits: Limits) -> (EngineHandle, Arc<MpExecutor>) {
    let config = WorkerConfig {
        device: "cuda".to_owned(),
        dtype: "f32".to_owned(),
        ..WorkerConfig::new(model)
    };
    let mut options = MpOptions::new(1, config);
    options.limits = limits;
    options.program.path = Some(env!("CARGO_BIN_EXE_denoised").into());
    options.program.env = standin.env();
    options.start_limit = Duration::from_secs(240);
    let executor = Arc::new(MpExecutor::start(options, &mut |_, _| {}).expect("the worker starts"));
    let policy = Box::new(RequestPolicy::new(1));
    let dispatched = Arc::clone(&executor) as Arc<dyn Executor>;
    let engine = Engine::start(dispatched, policy, EngineOptions::default()).expect("the engine starts");
    (engine, executor)
}

/// A square picture of two steps, to its end.
fn picture(engine: &EngineHandle, side_px: u32) -> Result<(), Failure> {
    let request = GenerateRequest {
        width: Some(side_px),
        height: Some(side_px),
        n_steps: Some(2),
        ..GenerateRequest::new("a red apple")
    };
    let handle = engine.submit(request, SubmitOptions::default())?;
    let ends = handle.filter_map(|event| match event {
        RequestEvent::Finished(_) => Some(Ok(())),
        RequestEvent::Failed(failure) => Some(Err(failure)),
        _ => None,
    });
    ends.last().expect("every request ends")
}

/// Bytes that the device holds beside the weights, now and at most.
fn device_memory(executor: &dyn Executor) -> (u64, u64) {
    let replies = denoised_executor::status::memory(executor, ANSWER_LIMIT).expect("the worker answers");
    let (_, memory) = replies[0];
    (memory.device_used_bytes, memory.device_peak_bytes)
}

#[test]
fn a_request_that_finds_no_device_memory_ends_alone_and_gives_all_back() {
    let standin = Standin {
        n_devices: 1,
        memory_bytes: Some(DEVICE_BYTES),
        ..Standin::default()
    };
    let (engine, executor) = start(&standin);
    picture(&engine, SMALL_PX).expect("a small picture fits");
    let (base, peak) = device_memory(&*executor);
    assert!(base < peak && peak < DEVICE_BYTES, "{base} used, {peak} at most");
    for _ in 0..2 {
        let failure = picture(&engine, LARGE_PX).expect_err("a large picture does not fit");
        assert_eq!(failure.code, FailureCode::OutOfMemory, "{failure}");
        // What it was for with its shape, what it needs and what is there.
        for word in ["[2, 512, 512, ", "bytes", "available"] {
            assert!(failure.message.contains(word), "{failure}");
        }
        picture(&engine, SMALL_PX).expect("a small picture fits again");
        let (used, _) = device_memory(&*executor);
        assert_eq!(used, base, "device memory is back to what it was");
    }
    engine.close(Duration::from_secs(10));
}

#[test]
fn a_fault_of_the_device_fails_the_worker_with_its_name_and_its_launch() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // During the start, and, without a warm-up, in the picture's wave.
    for more in [&[][..], &["--no-warm-up"]] {
        let standin = Standin {
            fault: Some(format!("{FAULTY_KERNEL}:20:700")),
            ..Standin::default()
        };
        let args = [
            "generate",
            "a red apple",
            "--steps",
            "2",
            "--seed",
            "1",
            "--device",
            "cuda",
            "--json",
        ];
        let outcome = run_on(&standin, folder.path(), &[&args[..], more].concat()).expect_code(5);
        let line = outcome.json_lines().remove(0);
        assert_eq!(line["error"]["code"], "worker_failed", "{line}");
        let message = line["error"]["message"].as_str().expect("a message");
        for word in [
            "rank 0",
            "CUDA_ERROR_ILLEGAL_ADDRESS",
            FAULTY_KERNEL,
            "grid ",
            "block ",
        ] {
            assert!(message.contains(word), "{word}: {message}");
        }
    }
}

/// A kernel that never ends: its worker says nothing more and is taken for hung, though its control thread answers all the while.
#[test]
fn a_kernel_that_never_ends_fails_the_worker_and_everything_goes() {
    let standin = Standin {
        n_devices: 1,
        // The first picture is the warm-up's.
        more: vec![("FAKECUDA_HANG", "to_pixels_f32:2".to_owned())],
        ..Standin::default()
    };
    let silence = Duration::from_secs(30);
    let limits = Limits {
        silence,
        ..Limits::default()
    };
    let (engine, executor) = start_of(&standin, &demo_model(), limits);
    let request = GenerateRequest {
        n_steps: Some(2),
        ..GenerateRequest::new("a red apple")
    };
    let handle = engine
        .submit(request, SubmitOptions::default())
        .expect("there is room");
    let mut failure = None;
    for event in handle {
        match event {
            RequestEvent::Step { n_done, n_steps } if n_done == n_steps => {
                device_memory(&*executor);
            }
            RequestEvent::Finished(_) => panic!("the kernel ended"),
            RequestEvent::Failed(own) => failure = Some(own),
            _ => {}
        }
    }
    let failure = failure.expect("every request ends");
    assert_eq!(failure.code, FailureCode::WorkerLost, "{failure}");
    assert!(failure.message.contains("reported nothing for 30s"), "{failure}");
    let report = engine.close(Duration::from_secs(10));
    assert!(report.is_complete && report.failure.is_some(), "{report:?}");
    assert_eq!(report.shutdown.ranks.len(), 1, "{report:?}");
}

/// Later steps are replays of one recording, whose fault names it; where every launch is waited for, the kernel is named there too.
#[test]
fn a_fault_in_a_recorded_step_names_the_recording_or_where_asked_for_the_kernel() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (check, culprit) in [("0", "in a recording of "), ("1", "in kernel step_bf16, grid ")] {
        let standin = Standin {
            // The sampler's update, once a step: the fourth is the third replay.
            fault: Some("step_bf16:4:719".to_owned()),
            more: vec![("DENOISED_CUDA_CHECK", check.to_owned())],
            ..Standin::default()
        };
        let args = [
            "generate",
            "a red apple",
            "--steps",
            "6",
            "--device",
            "cuda",
            "--json",
            "--no-warm-up",
        ];
        let outcome = run_on(&standin, folder.path(), &args).expect_code(5);
        let line = outcome.json_lines().remove(0);
        let message = line["error"]["message"].as_str().expect("a message");
        assert!(
            message.contains("CUDA_ERROR_LAUNCH_FAILED") && message.contains(culprit),
            "{message}"
        );
    }
}

/// Launched more than twenty times by a prompt's encoding.
const FAULTY_KERNEL: &str = "layer_norm_narrow_bf16";

// ---- libraries that are not there ----

/// A folder with the stand-in's libraries but for `missing`, which no other folder of this machine has either: files that are no
/// libraries stand before them.
fn without(missing: &[&str]) -> (tempfile::TempDir, Vec<(OsString, OsString)>) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for entry in fs::read_dir(standin::library_folder()).expect("the stand-in is there") {
        let path = entry.expect("a readable entry").path();
        let name = path.file_name().expect("a name");
        if !missing
            .iter()
            .any(|library| name == OsStr::new(&format!("{library}.so")))
        {
            symlink(&path, folder.path().join(name)).expect("a link can be made");
        }
    }
    for library in missing {
        let versions = (1..=15).map(|version| format!(".{version}"));
        for version in versions.chain([String::new()]) {
            fs::write(folder.path().join(format!("{library}.so{version}")), "").expect("a file can be made");
        }
    }
    let mut env = Standin::default().env();
    for (name, value) in &mut env {
        if name == "LD_LIBRARY_PATH" {
            *value = folder.path().into();
        }
    }
    (folder, env)
}

const ALL: [&str; 3] = ["libcuda", "libcublasLt", "libnvrtc"];

#[test]
fn a_library_that_is_missing_is_named_with_the_way_out() {
    for missing in [&ALL[..], &["libcuda"], &["libcublasLt"], &["libnvrtc"]] {
        let (_libraries, env) = without(missing);
        let folder = tempfile::tempdir().expect("a temporary folder");
        for device in ["cuda", "cuda:1"] {
            let mut command = denoised(folder.path());
            command
                .envs(env.clone())
                .args(["generate", "p", "--device", device]);
            let outcome = Running::start(command, b"").finish().expect_code(7);
            for word in [missing[0], "not found", "--device cpu"] {
                assert!(outcome.stderr.contains(word), "{missing:?}: {}", outcome.stderr);
            }
        }
    }
}

#[test]
fn auto_takes_the_cpu_where_cuda_does_not_work_and_says_why() {
    for missing in [&ALL[..], &["libnvrtc"]] {
        let (_libraries, env) = without(missing);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut command = denoised(folder.path());
        command
            .envs(env)
            .args(["generate", "p", "--seed", "1", "--steps", "1", "--device", "auto"]);
        let outcome = Running::start(command, b"").finish().expect_code(0);
        for word in ["device cpu", "f32", missing[0]] {
            assert!(outcome.stderr.contains(word), "{missing:?}: {}", outcome.stderr);
        }
    }
    // A driver that is too old.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let standin = Standin {
        more: vec![("FAKECUDA_DRIVER", "12020".to_owned())],
        ..Standin::default()
    };
    let args = ["generate", "p", "--seed", "1", "--steps", "1", "--device", "auto"];
    let outcome = run_on(&standin, folder.path(), &args).expect_code(0);
    for word in ["device cpu", "f32", "12.2", "update the driver"] {
        assert!(outcome.stderr.contains(word), "{word}: {}", outcome.stderr);
    }
    // Fewer devices than workers.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let args = [
        "generate",
        "p",
        "--seed",
        "1",
        "--steps",
        "1",
        "--device",
        "auto",
        "--workers",
        "3",
        "--json",
    ];
    let outcome = run_on(&Standin::default(), folder.path(), &args).expect_code(0);
    let line = outcome.json_lines().remove(0);
    assert_eq!((&line["device"], &line["dtype"]), (&"cpu".into(), &"f32".into()));
    let reason = line["device_reason"].as_str().expect("a reason");
    assert!(reason.contains("2 CUDA devices for 3 workers"), "{reason}");
}
