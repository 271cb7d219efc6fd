//! `denoised generate` as a person and as a script use it: files, texts, exit codes; and everything that can be wrong.

use crate::support::{Outcome, Running, case, copy_of, decode, demo_model, denoised, run};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn bytes_of(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a readable folder");
    let mut names: Vec<String> = entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

#[test]
fn a_prompt_becomes_a_picture_with_its_parameters_and_the_same_bytes_every_time() {
    let folder = folder();
    let folder = folder.path();
    let args = [
        "generate",
        "ein roter Apfel – 🍎",
        "--negative",
        "grey",
        "--seed",
        "7",
        "--steps",
        "3",
    ];
    let outcome = run(folder, &args).expect_code(0);
    assert!(
        outcome.text().starts_with("out.png: seed 7, 64x64, 3 steps"),
        "{}",
        outcome.text()
    );
    let bytes = bytes_of(&folder.join("out.png"));
    let picture = decode(&bytes);
    assert_eq!(picture.size, (64, 64));
    assert!(
        picture.rgb.iter().any(|&value| value != picture.rgb[0]),
        "one colour all over"
    );
    let text = |keyword: &str| {
        let found = picture.texts.iter().find(|(name, _)| name == keyword);
        found
            .unwrap_or_else(|| panic!("no text `{keyword}` in {:?}", picture.texts))
            .1
            .as_str()
    };
    assert_eq!(text("prompt"), "ein roter Apfel – 🍎");
    assert_eq!(text("negative prompt"), "grey");
    assert_eq!(text("steps"), "3");
    assert_eq!(text("size"), "64x64");
    assert_eq!(text("seed"), "7");
    assert_eq!(text("sampler"), "flow-euler");
    assert_eq!(text("model"), "emoji-dit");
    assert_eq!(text("family"), "sd3");
    assert_eq!(text("Software"), concat!("denoised ", env!("CARGO_PKG_VERSION")));
    assert!(text("guidance").parse::<f32>().is_ok());
    assert_eq!(picture.texts.len(), 10, "{:?}", picture.texts);

    // Neither time nor path nor executor, workers, threads and mode are in the bytes.
    let ways: [&[&str]; 6] = [
        &[],
        &["--executor", "uni"],
        &["--workers", "2", "--threads", "1"],
        &["--executor", "uni", "--threads", "3", "--no-warm-up"],
        &["--mode", "step"],
        &["--mode", "step", "--executor", "uni", "--max-batch", "1"],
    ];
    fs::create_dir(folder.join("elsewhere")).expect("a folder can be made");
    for (way_idx, way) in ways.iter().enumerate() {
        let name = format!("elsewhere/{way_idx}.png");
        let mut args = args.to_vec();
        args.extend(["-o", name.as_str()]);
        args.extend_from_slice(way);
        run(folder, &args).expect_code(0);
        assert!(bytes_of(&folder.join(&name)) == bytes, "{way:?}: other bytes");
    }
    assert_eq!(
        names_in(&folder.join("elsewhere")),
        ["0.png", "1.png", "2.png", "3.png", "4.png", "5.png"]
    );
}

#[test]
fn picture_i_is_the_one_of_seed_plus_i() {
    let folder = folder();
    let folder = folder.path();
    let args = ["generate", "a penguin", "--steps", "2", "--seed", "7"];
    let mut three = args.to_vec();
    three.extend(["--n", "3", "--workers", "2", "-o", "p.png"]);
    run(folder, &three).expect_code(0);
    assert_eq!(names_in(folder), ["p-0.png", "p-1.png", "p-2.png"]);
    run(
        folder,
        &[
            "generate",
            "a penguin",
            "--steps",
            "2",
            "--seed",
            "9",
            "-o",
            "alone.png",
        ],
    )
    .expect_code(0);
    assert!(bytes_of(&folder.join("p-2.png")) == bytes_of(&folder.join("alone.png")));
    assert!(bytes_of(&folder.join("p-0.png")) != bytes_of(&folder.join("p-1.png")));
}

#[test]
fn pictures_that_share_waves_are_those_that_do_not() {
    let folder = folder();
    let folder = folder.path();
    let args = ["generate", "a penguin", "--steps", "3", "--seed", "7", "--n", "5"];
    let pictures = |name: &str, extra: &[&str]| {
        let output = format!("{name}-{{index}}.png");
        let args = [&args[..], &["-o", &output, "--json"], extra].concat();
        let lines = run(folder, &args).expect_code(0).json_lines();
        assert_eq!(lines.len(), 5);
        let mode = lines[0]["mode"].as_str().map(str::to_owned);
        let pictures: Vec<_> = (0..5)
            .map(|image_idx| bytes_of(&folder.join(format!("{name}-{image_idx}.png"))))
            .collect();
        (mode, pictures)
    };
    let (mode, alone) = pictures("alone", &["--max-batch", "1"]);
    assert_eq!(mode.as_deref(), Some("request"));
    for (name, mode, extra) in [
        ("request", "request", &["--max-batch", "3"][..]),
        ("step", "step", &["--max-batch", "3"]),
        ("two", "step", &["--max-batch", "2", "--workers", "2"]),
    ] {
        let (told, shared) = pictures(name, &[&["--mode", mode], extra].concat());
        assert_eq!(told.as_deref(), Some(mode));
        assert!(shared == alone, "{mode} {extra:?}: other bytes");
    }
}

#[test]
fn a_profile_is_a_trace_with_one_process_per_rank() {
    let folder = folder();
    let folder = folder.path();
    for (mode, command) in [("request", "generate"), ("step", "generate"), ("step", "verify")] {
        let case = case("sd35m");
        let case = case.to_str().expect("a readable path");
        let what: &[&str] = match command {
            "generate" => &["generate", "a rocket", "--steps", "3", "--n", "4", "-q"],
            _ => &["verify", case, "--json"],
        };
        let how = ["--workers", "2", "--mode", mode, "--profile", "trace.json"];
        run(folder, &[what, &how].concat()).expect_code(0);
        let trace: serde_json::Value =
            serde_json::from_slice(&bytes_of(&folder.join("trace.json"))).expect("it is JSON");
        let events = trace["traceEvents"].as_array().expect("a list of events");
        let names: Vec<&str> = events
            .iter()
            .filter(|event| event["name"] == "process_name")
            .filter_map(|event| event["args"]["name"].as_str())
            .collect();
        assert_eq!(names, ["rank 0", "rank 1"]);
        for process in [1, 2] {
            let spans: Vec<_> = events
                .iter()
                .filter(|event| event["ph"] == "X" && event["pid"] == process)
                .collect();
            for what in ["wave", "encode", "step", "decode"] {
                assert!(
                    spans.iter().any(|span| span["name"] == what),
                    "{command} in {mode} mode: no `{what}` of rank {}",
                    process - 1
                );
            }
            let wave = spans
                .iter()
                .find(|span| span["name"] == "wave")
                .expect("seen above");
            assert_eq!(wave["args"]["mode"], mode);
            for span in spans {
                let is_a_time = |name: &str| span[name].as_f64().is_some_and(|value| value >= 0.0);
                assert!(is_a_time("ts") && is_a_time("dur"), "{span}");
            }
        }
    }
}

#[test]
fn prompts_come_from_a_file_or_standard_input() {
    let folder = folder();
    let folder = folder.path();
    let text = "# two prompts\n\na cat\n  a dog  \n";
    fs::write(folder.join("prompts.txt"), text).expect("a file can be written");
    let args = |source: &str, output: &str| {
        let args = [
            "generate",
            "--prompts",
            source,
            "-o",
            output,
            "--seed",
            "1",
            "--steps",
            "1",
            "--json",
        ];
        args.map(str::to_owned)
    };
    let lines = run(folder, &args("prompts.txt", "{index}-{seed}.png"))
        .expect_code(0)
        .json_lines();
    let prompts: Vec<&str> = lines.iter().filter_map(|line| line["prompt"].as_str()).collect();
    assert_eq!(prompts, ["a cat", "a dog"]);
    assert_eq!(lines[1]["file"], "1-1.png");

    let mut command = denoised(folder);
    command.args(args("-", "s.png"));
    Running::start(command, text.as_bytes()).finish().expect_code(0);
    assert!(bytes_of(&folder.join("s-1.png")) == bytes_of(&folder.join("1-1.png")));
}

#[test]
fn a_seed_that_was_drawn_is_told_and_repeats_the_picture() {
    let folder = folder();
    let folder = folder.path();
    let first = run(folder, &["generate", "a rocket", "--steps", "1", "-o", "a.png"])
        .expect_code(0)
        .text();
    let seed = first
        .split("seed ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .expect("it names the seed");
    assert!(first.contains("(random)"), "{first}");
    run(
        folder,
        &[
            "generate", "a rocket", "--steps", "1", "-o", "b.png", "--seed", seed,
        ],
    )
    .expect_code(0);
    assert!(bytes_of(&folder.join("a.png")) == bytes_of(&folder.join("b.png")));
}

#[test]
fn json_says_what_was_computed_one_line_per_picture() {
    let folder = folder();
    let args = [
        "generate", "a rocket", "--n", "2", "--seed", "3", "--steps", "2", "--json",
    ];
    let lines = run(folder.path(), &args).expect_code(0).json_lines();
    assert_eq!(lines.len(), 2);
    for (image_idx, line) in lines.iter().enumerate() {
        assert_eq!(line["index"], image_idx);
        assert_eq!(line["file"], format!("out-{image_idx}.png"));
        assert_eq!(line["seed"], 3 + image_idx);
        assert_eq!(
            (&line["width"], &line["height"], &line["steps"]),
            (&64.into(), &64.into(), &2.into())
        );
        assert_eq!(
            (&line["model"], &line["family"]),
            (&"emoji-dit".into(), &"sd3".into())
        );
        assert!(
            line["times_ms"]["denoise"].as_f64().is_some_and(|ms| ms > 0.0),
            "{line}"
        );
        assert!(line["warnings"].is_array(), "{line}");
    }
}

#[test]
fn a_dash_writes_the_picture_to_standard_output() {
    let folder = folder();
    let args = ["generate", "a rocket", "--steps", "1", "--seed", "3", "-o"];
    let outcome = run(folder.path(), &[&args[..], &["-"]].concat()).expect_code(0);
    assert_eq!(decode(&outcome.stdout).size, (64, 64));
    assert!(outcome.stderr.contains("seed 3"), "{}", outcome.stderr);
    assert!(names_in(folder.path()).is_empty());
    run(folder.path(), &[&args[..], &["-", "--n", "2"]].concat()).expect_code(2);
    run(folder.path(), &[&args[..], &["-", "--json"]].concat()).expect_code(2);
}

#[test]
fn quiet_means_quiet() {
    let folder = folder();
    let outcome = run(folder.path(), &["generate", "a rocket", "--steps", "1", "-q"]).expect_code(0);
    assert_eq!((outcome.text().as_str(), outcome.stderr.as_str()), ("", ""));
    assert_eq!(names_in(folder.path()), ["out.png"]);
}

#[test]
fn help_and_version_tell_what_there_is() {
    let folder = folder();
    let help = run(folder.path(), &["--help"]).expect_code(0).text();
    for word in [
        "generate",
        "verify",
        "bench",
        "Examples:",
        "Exit codes:",
        "130",
        "DENOISED_MODEL",
    ] {
        assert!(help.contains(word), "no `{word}` in\n{help}");
    }
    let help = run(folder.path(), &["generate", "--help"]).expect_code(0).text();
    for word in [
        "--seed",
        "--steps",
        "--guidance",
        "--size",
        "--prompts",
        "--workers",
        "--mode",
        "--max-batch",
        "--profile",
        "{index}",
    ] {
        assert!(help.contains(word), "no `{word}` in\n{help}");
    }
    let version = run(folder.path(), &["--version"]).expect_code(0).text();
    assert_eq!(version.trim(), concat!("denoised ", env!("CARGO_PKG_VERSION")));
}

// ---- what can be wrong ---------------------------------------------------------------------------

/// Runs `generate` with extra arguments that must fail, both ways, and checks code, text and that no file was left.
#[track_caller]
fn refused(extra: &[&str], code: i32, words: &[&str]) -> Outcome {
    let folder = folder();
    let args = [&["generate", "a rocket", "--seed", "1"][..], extra].concat();
    let outcome = run(folder.path(), &args).expect_code(code);
    for word in words {
        assert!(
            outcome.stderr.contains(word),
            "no `{word}` in: {}",
            outcome.stderr
        );
    }
    assert_eq!(outcome.text(), "");
    let lines = run(folder.path(), &[&args[..], &["--json"]].concat())
        .expect_code(code)
        .json_lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    let message = lines[0]["error"]["message"].as_str().expect("a message");
    for word in words {
        assert!(message.contains(word), "no `{word}` in: {message}");
    }
    assert!(lines[0]["error"]["code"].is_string());
    assert_eq!(names_in(folder.path()), Vec::<String>::new());
    outcome
}

/// A copy of the demo checkpoint with one thing done to it, and its path as text.
fn damaged(damage: impl FnOnce(&Path)) -> (tempfile::TempDir, String) {
    let folder = folder();
    let model = folder.path().join("model");
    copy_of(&demo_model(), &model);
    damage(&model);
    let path = model.to_str().expect("a readable path").to_owned();
    (folder, path)
}

#[test]
fn a_missing_weights_file_is_named() {
    let (_folder, model) = damaged(|model| {
        fs::remove_file(model.join("vae/diffusion_pytorch_model.safetensors")).expect("it is there");
    });
    refused(&["--model", &model], 3, &["vae", "safetensors"]);
    refused(
        &["--model", &model, "--executor", "uni"],
        3,
        &["vae", "safetensors"],
    );
    refused(&["--model", &model, "--workers", "3"], 3, &["vae", "safetensors"]);
}

#[test]
fn a_truncated_weights_file_is_named() {
    for keep_bytes in [0, 5, 100, 2_000_000] {
        let (_folder, model) = damaged(|model| {
            let path = model.join("transformer/diffusion_pytorch_model.safetensors");
            let file = fs::OpenOptions::new()
                .write(true)
                .open(path)
                .expect("it is there");
            file.set_len(keep_bytes).expect("it can be cut");
        });
        refused(
            &["--model", &model],
            3,
            &["diffusion_pytorch_model.safetensors", "truncated"],
        );
    }
}

#[test]
fn a_tensor_of_another_shape_is_named() {
    // Rows and columns of one matrix exchanged.
    let (_folder, model) = damaged(|model| {
        let path = model.join("transformer/diffusion_pytorch_model.safetensors");
        let mut bytes = fs::read(&path).expect("it is there");
        let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let header = String::from_utf8(bytes[8..8 + header_bytes].to_vec()).expect("it is text");
        let mut tensors: serde_json::Value = serde_json::from_str(&header).expect("it is JSON");
        let shape = &mut tensors["context_embedder.weight"]["shape"];
        let extents: Vec<u64> = serde_json::from_value(shape.clone()).expect("it has a shape");
        assert!(
            extents.len() == 2 && extents[0] != extents[1],
            "{extents:?} would be the same exchanged"
        );
        *shape = vec![extents[1], extents[0]].into();
        let mut header = tensors.to_string();
        while header.len() < header_bytes {
            header.push(' ');
        }
        assert_eq!(
            header.len(),
            header_bytes,
            "the header is written as compactly as it was"
        );
        bytes[8..8 + header_bytes].copy_from_slice(header.as_bytes());
        fs::write(path, bytes).expect("it can be written");
    });
    refused(&["--model", &model], 3, &["context_embedder.weight", "shape"]);
}

#[test]
fn an_unknown_pipeline_class_is_named_beside_the_known_ones() {
    let (_folder, model) = damaged(|model| {
        let path = model.join("model_index.json");
        let text = fs::read_to_string(&path).expect("it is there");
        fs::write(
            path,
            text.replace("StableDiffusion3Pipeline", "PaintByMagicPipeline"),
        )
        .expect("it can be written");
    });
    refused(
        &["--model", &model],
        3,
        &["PaintByMagicPipeline", "StableDiffusion3Pipeline"],
    );
}

#[test]
fn a_pickle_checkpoint_is_refused_with_a_way_out() {
    // Weights as older repositories ship them.
    let (_folder, model) = damaged(|model| {
        let transformer = model.join("transformer");
        fs::remove_file(transformer.join("diffusion_pytorch_model.safetensors")).expect("it is there");
        fs::write(
            transformer.join("diffusion_pytorch_model.bin"),
            b"PK\x03\x04archive/data.pkl",
        )
        .expect("it can be written");
    });
    refused(
        &["--model", &model],
        3,
        &["pickle", "diffusion_pytorch_model.bin", "save_pretrained"],
    );
    // A pickle under another name.
    let (_folder, model) = damaged(|model| {
        let path = model.join("transformer/diffusion_pytorch_model.safetensors");
        fs::write(path, b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01u.").expect("it can be written");
    });
    refused(&["--model", &model], 3, &["pickle"]);
    // A single file.
    let folder = folder();
    let file = folder.path().join("model.ckpt");
    fs::write(&file, b"PK\x03\x04archive/data.pkl").expect("it can be written");
    refused(
        &["--model", file.to_str().expect("a readable path")],
        3,
        &["model.ckpt"],
    );
}

#[test]
fn a_model_that_is_not_there_is_an_error_and_not_the_demo() {
    refused(&["--model", "no/such/folder"], 3, &["no/such/folder"]);
    let folder = folder();
    let mut command = denoised(folder.path());
    command
        .args(["generate", "a rocket"])
        .env("DENOISED_MODEL", "/no/such/model");
    let outcome = Running::start(command, b"").finish().expect_code(3);
    assert!(outcome.stderr.contains("DENOISED_MODEL"), "{}", outcome.stderr);
    // A folder without a checkpoint in it.
    refused(&["--model", "."], 3, &["model_index.json"]);
}

#[test]
fn the_variable_names_the_model_where_no_option_does() {
    let (_folder, model) = damaged(|_| {});
    let folder = folder();
    let mut command = denoised(folder.path());
    command
        .args(["generate", "a rocket", "--steps", "1", "--json"])
        .env("DENOISED_MODEL", &model);
    let lines = Running::start(command, b"").finish().expect_code(0).json_lines();
    assert_eq!(lines[0]["model"], "model");
}

#[test]
fn a_request_that_the_model_cannot_carry_out_is_refused_by_name() {
    refused(&["--size", "100x64"], 2, &["100"]);
    refused(&["--size", "64x65"], 2, &["65"]);
    refused(&["--sampler", "magic"], 2, &["magic", "flow-euler"]);
    refused(&["--size", "1000000x1000000"], 2, &["1000000"]);
}

#[test]
fn arguments_that_make_no_sense_are_refused_by_name() {
    refused(&["--steps", "0"], 2, &["--steps", "0"]);
    refused(&["--steps", "1001"], 2, &["--steps"]);
    refused(&["--size", "0x0"], 2, &["--size"]);
    refused(&["--n", "0"], 2, &["--n"]);
    refused(&["--workers", "0"], 2, &["--workers"]);
    refused(&["--guidance", "NaN"], 2, &["--guidance"]);
    refused(&["--seed", "x"], 2, &["--seed"]);
    refused(&["--frobnicate"], 2, &["--frobnicate"]);
    refused(&["--mode", "batch"], 2, &["--mode", "request, step"]);
    refused(&["--max-batch", "0"], 2, &["--max-batch"]);
    refused(&["-o", "picture.jpg"], 2, &["PNG"]);
    refused(&["--dtype", "bf16"], 2, &["bf16", "f32"]);
    refused(&["--device", "tpu"], 2, &["tpu", "cpu"]);
    refused(&["--device", "cuda:x"], 2, &["cuda:x", "cuda:N"]);
}

#[test]
fn an_executor_that_is_not_there_is_refused_with_the_known_ones() {
    refused(&["--executor", "threads"], 2, &["threads", "uni", "mp"]);
    refused(&["--executor", "ray"], 2, &["ray", "not in this version"]);
    refused(
        &["--executor", "external_launcher"],
        2,
        &["external_launcher", "not in this version"],
    );
    refused(
        &["--executor", "uni", "--workers", "2"],
        2,
        &["uni", "one worker"],
    );
}

#[test]
fn an_empty_prompt_file_is_an_error() {
    let folder = folder();
    for text in ["", "\n \n", "# nothing\n"] {
        fs::write(folder.path().join("prompts.txt"), text).expect("a file can be written");
        let outcome = run(folder.path(), &["generate", "--prompts", "prompts.txt"]).expect_code(2);
        assert!(
            outcome.stderr.contains("prompts.txt contains no prompt"),
            "{}",
            outcome.stderr
        );
    }
    let outcome = run(folder.path(), &["generate", "--prompts", "-"]).expect_code(2);
    assert!(
        outcome.stderr.contains("standard input contains no prompt"),
        "{}",
        outcome.stderr
    );
    run(folder.path(), &["generate", "--prompts", "absent.txt"]).expect_code(2);
    // An empty prompt is a prompt.
    run(folder.path(), &["generate", "", "--steps", "1"]).expect_code(0);
}

#[test]
fn an_output_that_cannot_be_written_is_exit_code_6() {
    refused(&["-o", "no/such/folder/out.png"], 6, &["no/such/folder"]);
    refused(&["--steps", "1", "-o", "/dev/full"], 6, &["/dev/full"]);
    refused(&["-o", "/"], 2, &["-o /"]);
    refused(&["--profile", "no/such/folder/t.json"], 6, &["no/such/folder"]);
    refused(&["--profile", "."], 6, &["it is a folder"]);
    refused(&["--profile", "-"], 2, &["--profile"]);
    let folder = folder();
    fs::create_dir(folder.path().join("out.png")).expect("a folder can be made");
    let outcome = run(folder.path(), &["generate", "a rocket"]).expect_code(6);
    assert!(outcome.stderr.contains("it is a folder"), "{}", outcome.stderr);
}

#[test]
fn a_full_disk_leaves_no_half_written_file() {
    let folder = folder();
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).expect("a folder can be made");
    // One page in a namespace of its own, which goes with its last process.
    let script = "mount -t tmpfs -o size=4k none disk && shift 0 && \"$@\"; code=$?; ls -A disk; exit $code";
    let program = PathBuf::from(env!("CARGO_BIN_EXE_denoised"));
    let in_namespace = |args: &[&str]| {
        #[expect(
            clippy::disallowed_methods,
            reason = "the namespace has to be made before the program starts"
        )]
        let mut command = std::process::Command::new("unshare");
        command.current_dir(folder.path()).args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
        ]);
        command
            .args(args)
            .stdin(Stdio::null())
            .env_remove("DENOISED_MODEL");
        command
    };
    let can_mount = in_namespace(&["true"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !can_mount {
        // The other halves are tested everywhere: /dev/full above, the removal in the program's own tests.
        #[expect(clippy::print_stderr, reason = "a skipped test says so")]
        {
            eprintln!("skipped: this machine lets no test mount a file system");
        }
        return;
    }
    let program = program.to_str().expect("a readable path");
    let args = [
        program,
        "generate",
        "a rocket",
        "--steps",
        "1",
        "--n",
        "2",
        "-o",
        "disk/out.png",
    ];
    let outcome = Running::start(in_namespace(&args), b"").finish().expect_code(6);
    assert!(outcome.stderr.contains("disk/out-0.png"), "{}", outcome.stderr);
    assert_eq!(outcome.text(), "", "files are left");
}

#[test]
fn a_closed_standard_output_is_an_exit_code_and_no_panic() {
    let folder = folder();
    let cases: [&[&str]; 4] = [
        &["generate", "a rocket", "--steps", "1"],
        &["generate", "a rocket", "--steps", "1", "--json", "--n", "3"],
        &["generate", "a rocket", "--steps", "1", "-o", "-"],
        &["generate", "a rocket", "--steps", "0", "--json"],
    ];
    for args in cases {
        let mut command = denoised(folder.path());
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("it ends");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
        let expected = if args.contains(&"0") { 2 } else { 6 };
        assert_eq!(output.status.code(), Some(expected), "{args:?}: {stderr}");
    }
    // A descriptor that was never open.
    for args in cases {
        #[expect(
            clippy::disallowed_methods,
            reason = "a test starts a shell that closes its descriptor"
        )]
        let mut shell = std::process::Command::new("sh");
        let program = env!("CARGO_BIN_EXE_denoised");
        shell.args(["-c", "exec \"$0\" \"$@\" >&-", program]).args(args);
        let output = shell.current_dir(folder.path()).output().expect("a shell starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        let expected = if args.contains(&"0") { 2 } else { 6 };
        assert_eq!(output.status.code(), Some(expected), "{args:?}: {stderr}");
    }
    // The full standard output, and a closed standard error.
    let mut command = denoised(folder.path());
    command.args(cases[0]);
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full is there");
    command.stdout(full).stderr(Stdio::piped());
    let output = command
        .spawn()
        .expect("the program starts")
        .wait_with_output()
        .expect("it ends");
    assert_eq!(
        output.status.code(),
        Some(6),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut command = denoised(folder.path());
    command
        .args(["generate", "a rocket", "--steps", "0", "-vvv"])
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    drop(child.stderr.take());
    assert_eq!(child.wait().expect("it ends").code(), Some(2));
}

#[test]
fn the_worker_program_says_what_it_is_for() {
    #[expect(
        clippy::disallowed_methods,
        reason = "tests start the programs as a person does"
    )]
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_denoised-worker"))
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("executor"), "{stderr}");
}
