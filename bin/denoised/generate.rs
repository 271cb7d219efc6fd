//! `denoised generate`: prompts in, PNG files out.

use crate::args::{GenerateArgs, MAX_IMAGES};
use crate::error::Error;
use crate::output::{Target, say, write_stdout};
use crate::png_file::{self, Parameters};
use crate::profile::{self, Recording};
use crate::progress::Progress;
use crate::{interrupt, model_folder, picture_file, prompts, video_file, world};
use denoised_engine::{
    Engine, EngineHandle, EngineOptions, Output, RequestEvent, RequestHandle, SubmitOptions, policy,
};
use denoised_types::{Failure, FailureCode, GenerateRequest, Image, Mask, WorkerDevice};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A person who waits longer for a picture can still be waiting for it: Ctrl-C is the way out.
const DEADLINE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Time for workers to end after the last picture.
const CLOSE_BUDGET: Duration = Duration::from_secs(10);
/// How long after Ctrl-C the pictures that are being computed may take to stop: a worker that is stopped or hung never says so.
const CANCEL_LIMIT: Duration = Duration::from_secs(3);
/// Frames per second where neither the model nor anybody names them.
const DEFAULT_FPS: u32 = 16;
/// How often waiting looks at Ctrl-C and at all pictures.
const TURN: Duration = Duration::from_millis(50);

/// One picture of the command.
#[derive(Clone, Debug)]
struct Picture {
    image_idx: usize,
    prompt: String,
    seed: u64,
}

/// Runs the command.
///
/// # Errors
/// The first that stopped it, or [`Error::Pictures`] if pictures failed.
pub(crate) fn run(args: &GenerateArgs) -> Result<(), Error> {
    let (pictures, seed_is_random) = pictures_of(args)?;
    if args.json
        && args
            .output
            .as_ref()
            .is_some_and(|output| output.as_os_str() == "-")
    {
        return Err(Error::usage(
            "-o - and --json both write to standard output; name a file",
        ));
    }
    let model = model_folder::choose(args.model.as_deref())?;
    let seeds: Vec<u64> = pictures.iter().map(|picture| picture.seed).collect();
    let inputs = Inputs::read(args)?;
    // Known before any work where it is named; what is made by default depends on the model.
    let named = args.output.as_deref().map(|output| Target::new(output, &seeds));
    let named = named.transpose()?;

    profile::check(args.profile.as_deref())?;

    let progress = Progress::new(!args.quiet && !args.json);
    let executor = world::start(&args.world, &model, &progress)?;
    let world = executor.world();
    if !args.quiet && !args.json && !world.devices.is_empty() {
        let shown = world::shown_devices(&world.devices);
        progress.suspend(|| say(&format!("device {shown}")));
    }
    let devices = world.devices;
    let model_info = world.model.unwrap_or_default();
    let target = target(named, model_info.video.is_some(), args.frames, &seeds).inspect_err(|_| {
        executor.shutdown(CLOSE_BUDGET);
    })?;
    let options = EngineOptions {
        default_deadline: DEADLINE,
        ..EngineOptions::default()
    };
    let max_batch = args.max_batch();
    // As many as are computed at a time, and as many more, so that the next wave is full too.
    let window = 2 * usize::from(args.world.workers) * max_batch;
    let policy = policy(args.mode.into(), window, max_batch)?;
    let recording = Recording::start(args.profile.as_deref(), &executor).inspect_err(|_| {
        executor.shutdown(CLOSE_BUDGET);
    })?;
    let engine = Engine::start(executor, policy, options)?;
    let watched = interrupt::watched(|| {});
    progress.begin_pictures();

    let mut session = Session {
        args,
        engine: &engine,
        target: &target,
        progress: &progress,
        inputs,
        family: model_info.family,
        fps: args.fps.or(model_info.video.map(|video| video.fps)),
        devices,
        model_name: model_folder::name_of(&model),
        seed_is_random,
        n_pictures: pictures.len(),
        n_finished: 0,
        n_failed: 0,
        first_failure: None,
        stop: None,
    };
    let outcome = session.run(pictures, window);
    // While the workers are there. What went wrong before is the news, not that the profile could not be had then.
    let outcome = match recording.map_or(Ok(()), Recording::write) {
        Err(error) if outcome.is_ok() => Err(error),
        _ => outcome,
    };
    // Nothing is left that a first Ctrl-C would have to wait for.
    drop(watched);
    drop(progress);
    engine.close(if interrupt::is_interrupted() {
        interrupt::CLOSE_BUDGET
    } else {
        CLOSE_BUDGET
    });
    outcome
}

/// Pictures that all requests bring.
struct Inputs {
    images: Vec<Image>,
    mask: Option<Mask>,
}

impl Inputs {
    fn read(args: &GenerateArgs) -> Result<Self, Error> {
        let max = GenerateRequest::MAX_IMAGES;
        if args.images.len() > max {
            let n = args.images.len();
            return Err(Error::usage(format!(
                "--image is given {n} times, at most {max} are possible"
            )));
        }
        let images = args.images.iter().map(|path| picture_file::read_image(path));
        Ok(Self {
            images: images.collect::<Result<_, _>>()?,
            mask: args.mask.as_deref().map(picture_file::read_mask).transpose()?,
        })
    }
}

/// Where results go: as was named, else as fits what the model makes.
fn target(
    named: Option<Target>,
    is_video: bool,
    n_frames: Option<u32>,
    seeds: &[u64],
) -> Result<Target, Error> {
    let is_still = !is_video || n_frames == Some(1);
    let target = match named {
        Some(target) => target,
        None => Target::new(Path::new(if is_still { "out.png" } else { "out.webp" }), seeds)?,
    };
    match (is_still, target.is_webp()) {
        (true, Some(true)) => Err(Error::usage("pictures are written as PNG: name the file .png")),
        (false, Some(false)) => Err(Error::usage(
            "videos are written as animated WebP: name the file .webp",
        )),
        _ => Ok(target),
    }
}

/// All pictures in order, and whether their seed was drawn here.
fn pictures_of(args: &GenerateArgs) -> Result<(Vec<Picture>, bool), Error> {
    let prompts = match (&args.prompt, &args.prompts) {
        (_, Some(path)) => prompts::read(path)?,
        (Some(prompt), None) => vec![prompt.clone()],
        (None, None) => return Err(Error::usage("no prompt")),
    };
    let n_pictures = prompts.len().saturating_mul(args.n_images as usize);
    if n_pictures > MAX_IMAGES {
        return Err(Error::usage(format!(
            "{} prompts with {} pictures each are {n_pictures} pictures; at most {MAX_IMAGES} at once",
            prompts.len(),
            args.n_images
        )));
    }
    // 32 bits are easier to type again, and enough.
    let random = || RandomState::new().build_hasher().finish() & u64::from(u32::MAX);
    let seed = args.seed.unwrap_or_else(random);
    let all = prompts
        .iter()
        .flat_map(|prompt| (0..u64::from(args.n_images)).map(move |i| (prompt, i)));
    let pictures = all
        .enumerate()
        .map(|(image_idx, (prompt, i))| Picture {
            image_idx,
            prompt: prompt.clone(),
            seed: seed.wrapping_add(i),
        })
        .collect();
    Ok((pictures, args.seed.is_none()))
}

/// A picture that is being computed.
struct InFlight {
    picture: Picture,
    handle: RequestHandle,
    submitted_at: Instant,
    n_done: u32,
    n_steps: u32,
    end: Option<Result<Output, Failure>>,
}

impl InFlight {
    fn new(picture: Picture, handle: RequestHandle) -> Self {
        Self {
            picture,
            handle,
            submitted_at: Instant::now(),
            n_done: 0,
            n_steps: 0,
            end: None,
        }
    }

    fn take(&mut self, event: RequestEvent) {
        match event {
            RequestEvent::Queued { .. } => {}
            RequestEvent::Started { rank } => {
                tracing::info!("picture {} begun on rank {rank}", self.picture.image_idx)
            }
            RequestEvent::Step { n_done, n_steps } => (self.n_done, self.n_steps) = (n_done, n_steps),
            RequestEvent::Finished(output) => self.end = Some(Ok(output)),
            RequestEvent::Failed(failure) => self.end = Some(Err(failure)),
        }
    }
}

/// The state of one run of the command.
struct Session<'a> {
    args: &'a GenerateArgs,
    engine: &'a EngineHandle,
    target: &'a Target,
    progress: &'a Progress,
    inputs: Inputs,
    family: String,
    /// Frames per second of files of videos.
    fps: Option<u32>,
    /// By rank.
    devices: Vec<WorkerDevice>,
    model_name: String,
    seed_is_random: bool,
    n_pictures: usize,
    n_finished: usize,
    n_failed: usize,
    first_failure: Option<Error>,
    /// Why no further picture is begun.
    stop: Option<String>,
}

impl Session<'_> {
    fn run(&mut self, pictures: Vec<Picture>, window: usize) -> Result<(), Error> {
        let mut waiting: VecDeque<Picture> = pictures.into();
        let mut in_flight: VecDeque<InFlight> = VecDeque::new();
        // Why the first of those that wait was not admitted.
        let mut refused: Option<Failure> = None;
        let mut cancelled_at: Option<Instant> = None;
        while !waiting.is_empty() || !in_flight.is_empty() {
            if interrupt::is_interrupted() && cancelled_at.is_none() {
                cancelled_at = Some(Instant::now());
                self.stop.get_or_insert_with(|| "interrupted".to_owned());
                self.first_failure.get_or_insert_with(interrupt::interrupted);
                in_flight.iter().for_each(|one| one.handle.cancel());
            }
            if cancelled_at.is_some_and(|at| at.elapsed() >= CANCEL_LIMIT) {
                for one in in_flight.drain(..) {
                    let text = format!("interrupted; its worker did not stop within {CANCEL_LIMIT:?}");
                    self.failed(&one.picture, Failure::new(FailureCode::Cancelled, text).into())?;
                }
            }
            while self.stop.is_none()
                && in_flight.len() < window
                && let Some(picture) = waiting.pop_front()
            {
                match self
                    .engine
                    .submit(self.request_for(&picture), SubmitOptions::default())
                {
                    Ok(handle) => in_flight.push_back(InFlight::new(picture, handle)),
                    Err(failure) => {
                        self.stop = Some(format!("an earlier picture failed: {failure}"));
                        refused = Some(failure);
                        waiting.push_front(picture);
                    }
                }
            }
            if let (Some(reason), true) = (&self.stop, in_flight.is_empty()) {
                let reason = format!("not started: {reason}");
                for picture in waiting.drain(..) {
                    let not_started = || Failure::new(FailureCode::Cancelled, reason.clone());
                    self.failed(&picture, refused.take().unwrap_or_else(not_started).into())?;
                }
            }
            for one in &mut in_flight {
                while let Some(event) = one.handle.try_next() {
                    one.take(event);
                }
            }
            // Results are written in order, so the oldest is the one to wait for.
            let Some(oldest) = in_flight.front_mut() else {
                continue;
            };
            if oldest.end.is_none()
                && let Some(event) = oldest.handle.next_until(Instant::now() + TURN)
            {
                oldest.take(event);
            }
            self.show_steps(&in_flight);
            while let Some(end) = in_flight.front_mut().and_then(|oldest| oldest.end.take()) {
                let Some(one) = in_flight.pop_front() else { break };
                match end {
                    Ok(output) => self.finished(&one, &output)?,
                    Err(failure) => {
                        self.stop_after(&failure);
                        self.failed(&one.picture, failure.into())?;
                    }
                }
            }
        }
        match self.first_failure.take() {
            Some(first) if self.n_failed > 0 => Err(Error::Pictures {
                first: Box::new(first),
                n_failed: self.n_failed,
                n_pictures: self.n_pictures,
            }),
            // Ctrl-C may come when the last picture is done already.
            _ => Ok(()),
        }
    }

    fn request_for(&self, picture: &Picture) -> GenerateRequest {
        let args = self.args;
        GenerateRequest {
            negative_prompt: args.negative.clone(),
            width: args.size.map(|(width, _)| width),
            height: args.size.map(|(_, height)| height),
            n_steps: args.steps,
            guidance: args.guidance,
            guidance_2: args.guidance_2,
            true_guidance: args.true_guidance,
            seed: picture.seed,
            n_frames: args.frames,
            sampler: args.sampler.clone(),
            sigmas: args.sigmas.clone(),
            max_sequence_length: args.max_sequence_length,
            clip_skip: args.clip_skip,
            images: self.inputs.images.clone(),
            mask: self.inputs.mask.clone(),
            strength: args.strength,
            ..GenerateRequest::new(picture.prompt.clone())
        }
    }

    /// A failure that the next picture would meet too ends the command; one of this picture alone does not.
    fn stop_after(&mut self, failure: &Failure) {
        let is_its_own = match failure.code {
            FailureCode::NonFinite | FailureCode::DeadlineExceeded => true,
            FailureCode::InvalidRequest
            | FailureCode::InvalidModel
            | FailureCode::NoDevice
            | FailureCode::OutOfMemory
            | FailureCode::WorkerLost
            | FailureCode::WorkerFailed
            | FailureCode::Cancelled
            | FailureCode::QueueFull
            | FailureCode::Closed
            | FailureCode::Protocol
            | FailureCode::Internal => false,
        };
        if self.stop.is_none() && !is_its_own {
            self.stop = Some(format!("an earlier picture failed: {failure}"));
        }
    }

    fn show_steps(&self, in_flight: &VecDeque<InFlight>) {
        // All pictures have the same number of steps, known once one has begun.
        let n_steps = in_flight
            .iter()
            .map(|one| u64::from(one.n_steps))
            .max()
            .unwrap_or(0);
        if n_steps == 0 {
            return;
        }
        // Several are under way at a time, and they do not end in the order in which they are written.
        let n_ended =
            self.n_finished + self.n_failed + in_flight.iter().filter(|one| one.end.is_some()).count();
        let running = in_flight.iter().filter(|one| one.end.is_none());
        let n_done = n_ended as u64 * n_steps + running.map(|one| u64::from(one.n_done)).sum::<u64>();
        let message = match self.n_pictures {
            1 => "picture".to_owned(),
            n_pictures => format!("{n_ended} of {n_pictures} pictures"),
        };
        self.progress
            .steps(n_done, self.n_pictures as u64 * n_steps, message);
    }

    fn finished(&mut self, one: &InFlight, output: &Output) -> Result<(), Error> {
        let picture = &one.picture;
        let (resolved, times) = (output.resolved(), output.times());
        let further = further_parameters(self.args);
        let parameters = Parameters {
            prompt: &picture.prompt,
            negative_prompt: self.args.negative.as_deref(),
            resolved,
            further: &further,
            family: &self.family,
            model_name: &self.model_name,
        };
        let bytes = match output.n_frames() {
            1 => {
                png_file::encode(output.size(), output.rgb(), &parameters).map_err(|cause| cause.to_string())
            }
            n => video_file::encode(output.size(), n, self.fps.unwrap_or(DEFAULT_FPS), output.rgb()),
        };
        let bytes = bytes.map_err(|cause| {
            Failure::new(
                FailureCode::Internal,
                format!("cannot encode the picture: {cause}"),
            )
        })?;
        if let Err(error) = self.target.write(picture.image_idx, &bytes) {
            // The next one would not find room either.
            self.stop = Some(format!("an earlier picture failed: {error}"));
            return self.failed(picture, error);
        }
        self.n_finished += 1;
        let file = self.target.file(picture.image_idx);
        if self.args.json {
            let device = self.devices.get(usize::from(output.rank().0));
            return write_line(&json!({
                "index": picture.image_idx,
                "file": file,
                "prompt": picture.prompt,
                "negative_prompt": self.args.negative,
                "seed": resolved.seed,
                "width": resolved.width,
                "height": resolved.height,
                "frames": resolved.n_frames,
                "steps": resolved.n_steps,
                "guidance": resolved.guidance,
                "sampler": resolved.sampler,
                "further": further.iter().cloned().collect::<BTreeMap<_, _>>(),
                "model": self.model_name,
                "family": self.family,
                "mode": self.args.mode.name(),
                "rank": output.rank(),
                "device": device.map(|device| &device.name),
                "device_description": device.map(|device| &device.description),
                "dtype": device.map(|device| &device.dtype),
                "device_reason": device.and_then(|device| device.reason.as_ref()),
                "times_ms": {
                    "encode": times.encode_ms,
                    "denoise": times.denoise_ms,
                    "decode": times.decode_ms,
                    "total": one.submitted_at.elapsed().as_secs_f64() * 1e3,
                },
                "warnings": resolved.warnings,
            }));
        }
        self.progress.suspend(|| {
            for warning in &resolved.warnings {
                say(&format!("denoised: warning: {warning}"));
            }
            if self.args.quiet {
                return Ok(());
            }
            let seconds = (times.encode_ms + times.denoise_ms + times.decode_ms) / 1e3;
            let line = format!(
                "seed {}{}, {}x{}{}, {} steps, {seconds:.2} s",
                resolved.seed,
                if self.seed_is_random { " (random)" } else { "" },
                resolved.width,
                resolved.height,
                match output.n_frames() {
                    1 => String::new(),
                    n => format!(", {n} frames"),
                },
                resolved.n_steps,
            );
            match file {
                Some(file) => write_stdout(format!("{}: {line}\n", file.display()).as_bytes()),
                // The standard output is the picture.
                None => {
                    say(&line);
                    Ok(())
                }
            }
        })
    }

    /// Reports a picture that will not be; the error returned is that of reporting.
    fn failed(&mut self, picture: &Picture, error: Error) -> Result<(), Error> {
        interrupt::stand_by_if_ending();
        self.n_failed += 1;
        let reported = if self.args.json {
            write_line(&json!({
                "index": picture.image_idx,
                "prompt": picture.prompt,
                "seed": picture.seed,
                "error": {"code": error.code(), "message": error.to_string()},
            }))
        } else {
            Ok(())
        };
        self.first_failure.get_or_insert(error);
        reported
    }
}

/// What was asked for beside the common arguments, for whoever wants to repeat a picture. Files are named without their folders.
fn further_parameters(args: &GenerateArgs) -> Vec<(&'static str, String)> {
    let name = |path: &PathBuf| {
        path.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    let images: Vec<String> = args.images.iter().map(name).collect();
    let sigmas: Vec<String> = args.sigmas.iter().map(f32::to_string).collect();
    let given = |text: String| (!text.is_empty()).then_some(text);
    [
        ("guidance 2", args.guidance_2.map(|scale| scale.to_string())),
        ("true guidance", args.true_guidance.map(|scale| scale.to_string())),
        ("sigmas", given(sigmas.join(","))),
        (
            "max sequence length",
            args.max_sequence_length.map(|n| n.to_string()),
        ),
        ("clip skip", args.clip_skip.map(|n| n.to_string())),
        ("image", given(images.join(", "))),
        ("mask", args.mask.as_ref().map(name)),
        ("strength", args.strength.map(|strength| strength.to_string())),
    ]
    .into_iter()
    .filter_map(|(keyword, text)| Some((keyword, text?)))
    .collect()
}

fn write_line(value: &Value) -> Result<(), Error> {
    write_stdout(format!("{value}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn seeds_of(args: &[&str]) -> (Vec<(usize, String, u64)>, bool) {
        let cli = Cli::try_parse_from(["denoised", "generate"].iter().chain(args)).unwrap();
        let Command::Generate(args) = cli.command else {
            unreachable!("the subcommand is given above")
        };
        let (pictures, is_random) = pictures_of(&args).unwrap();
        let list = pictures
            .into_iter()
            .map(|one| (one.image_idx, one.prompt, one.seed));
        (list.collect(), is_random)
    }

    #[test]
    fn picture_i_of_each_prompt_uses_seed_plus_i() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("prompts.txt");
        std::fs::write(&file, "a\nb\n").unwrap();
        let (pictures, is_random) =
            seeds_of(&["--prompts", file.to_str().unwrap(), "--n", "2", "--seed", "7"]);
        let expected = [(0, "a", 7), (1, "a", 8), (2, "b", 7), (3, "b", 8)];
        assert_eq!(
            pictures,
            expected.map(|(idx, prompt, seed)| (idx, prompt.to_owned(), seed))
        );
        assert!(!is_random);
        let (pictures, _) = seeds_of(&["p", "--seed", "18446744073709551615", "--n", "2"]);
        assert_eq!((pictures[0].2, pictures[1].2), (u64::MAX, 0));
    }

    #[test]
    fn a_seed_that_is_not_given_is_drawn_each_time() {
        let draw = || {
            let (pictures, is_random) = seeds_of(&["p"]);
            assert!(is_random);
            pictures[0].2
        };
        let seeds: std::collections::BTreeSet<u64> = (0..20).map(|_| draw()).collect();
        assert!(seeds.len() > 15, "{seeds:?}");
    }
}
