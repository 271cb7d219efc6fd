//! The command line: names, defaults, ranges and help texts. Says nothing about how anything is done.

use clap::{ArgAction, ArgGroup, Args, Parser, Subcommand, ValueEnum};
use denoised_types::{GenerateRequest, Mode};
use std::path::PathBuf;

/// Most pictures of one command.
pub(crate) const MAX_IMAGES: usize = 100_000;

const EXIT_CODES: &str = "\
Exit codes:
  0    all went well
  1    a check found a difference (verify), or a failure without a code of its own
  2    the command line, the request or the case makes no sense
  3    the checkpoint cannot be used
  4    not enough memory
  5    a worker died, hung or failed
  6    an output could not be written (full disk, missing folder, closed pipe)
  7    no such device
  130  interrupted (Ctrl-C)

Environment:
  DENOISED_MODEL  checkpoint folder to use when --model is not given
  DENOISED_LOG    what to log to stderr: error, warn, info, debug, trace, or filters such as
                  warn,denoised_executor=debug (stronger than -v)";

const EXAMPLES: &str = "\
Examples:
  denoised generate 'a red apple'
  denoised generate 'a red apple' -o apple.png --seed 7 --steps 20 --n 4
  denoised generate --prompts prompts.txt -o 'out/{index}-{seed}.png' --workers 2
  denoised generate 'a red apple' --json | jq .file
  denoised verify tests/data/sd35m --workers 3
";

const AFTER_HELP: &str = "Run `denoised help COMMAND` or `denoised COMMAND --help` for a command's options.";

const GENERATE_HELP: &str = "\
Seeds: picture i of every prompt (from 0) uses SEED + i, so each can be made again alone.

Output names: with several pictures, `-o out.png` becomes out-0.png, out-1.png, … over all prompts.
`{index}` and `{seed}` in the name are replaced by the picture's number and seed. A finished picture
appears under its name at once and whole; an existing file of that name is replaced.

Prompt files (--prompts): UTF-8, one prompt per line. Blank lines and lines that start with `#` are
skipped; a prompt that starts with `#` is written `\\#`.

PNG text: prompt, negative prompt, steps, guidance, size, seed, sampler, model, family, Software; beside
these what else was given: names of picture and mask, strength, sigmas, further guidance scales, …

--json: one object per picture on stdout, in order; one that fails has an `error` and no `file`. A
command that fails as a whole prints {\"error\":{\"code\":…,\"message\":…}}.";

const VERIFY_HELP: &str = "\
CASE is a folder with model/, reference.json and reference.safetensors, as
scripts/reference/make_reference.py writes them. The case runs once per rank at the same time: first
from the initial latents that the reference gives, then from its seed. Every tensor is compared by
relative L2 error, integers exactly, and its SHA-256 must be the same on all ranks. Exit code 0 only
if every tensor of both sides is matched, of the same shape, finite and within its limit: 1e-4 (pictures
1e-3), in bf16 and f16 the larger of 2e-2 and 1.25 times the reference's own error in bf16.

--share N: the case runs once more while N other requests share its waves on every rank, and must come
out the same to the last bit (on CUDA within its limits). They have seeds, prompts and step counts of their own and start before,
with and after the case; one in four has another size and guidance, one in four is given up on the way.";

const MODES_HELP: &str = "\
Modes: in request mode a wave is whole pictures, and those that share it begin and end together. In
step mode a wave is one denoiser step of each, and pictures join and leave between steps. Either way
they are the same, byte for byte (on CUDA within rounding).";

/// Diffusion models through worker processes.
///
/// Makes pictures from text with a diffusion checkpoint, in worker processes that this program starts
/// and stops by itself. Without --model it uses the small demo checkpoint that comes with it.
#[derive(Debug, Parser)]
#[command(name = "denoised", version, max_term_width = 100)]
#[command(after_help = AFTER_HELP, after_long_help = format!("{EXAMPLES}\n{EXIT_CODES}"))]
pub(crate) struct Cli {
    /// Log more to stderr: -v info, -vv debug, -vvv trace
    #[arg(short, long, global = true, action = ArgAction::Count, display_order = 900)]
    pub(crate) verbose: u8,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make pictures from prompts
    #[command(after_long_help = format!("{MODES_HELP}\n\n{GENERATE_HELP}\n\n{EXIT_CODES}"))]
    Generate(Box<GenerateArgs>),
    /// Compare a model with a stored reference case, tensor by tensor
    #[command(after_long_help = format!("{MODES_HELP}\n\n{VERIFY_HELP}\n\n{EXIT_CODES}"))]
    Verify(VerifyArgs),
    /// List the samplers and the names that they answer to
    Samplers(SamplersArgs),
    /// Measure message paths, denoise steps and memory on this machine
    Bench(BenchArgs),
}

/// How the workers come to exist and what they compute with.
#[derive(Clone, Debug, Args)]
pub(crate) struct WorldArgs {
    /// How workers exist: `mp` (processes on this machine) or `uni` (a thread of this process)
    #[arg(long, value_name = "NAME", default_value = "mp")]
    pub(crate) executor: String,

    /// Workers; each holds a replica of the model, and requests are spread over them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) workers: u16,

    /// Threads per worker [default: the cores of this machine divided by the workers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,

    /// Device: `cpu`, `cuda` (one per worker), `cuda:N`, or `auto`: `cuda` where there are enough, else `cpu`
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    pub(crate) device: String,

    /// Dtype of the computation: `f32`, `bf16`, `f16`; device `cpu` has `f32` [default: bf16 on cuda, f32 on cpu and in verify]
    #[arg(long, value_name = "NAME")]
    pub(crate) dtype: Option<String>,

    /// Start without the small picture that every worker computes before it counts as ready
    #[arg(long)]
    pub(crate) no_warm_up: bool,
}

/// How a wave runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeName {
    /// A wave is whole pictures
    Request,
    /// A wave is one step of each picture
    Step,
}

impl ModeName {
    /// As on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Step => "step",
        }
    }
}

impl WorldArgs {
    /// `--dtype`, or the device's own.
    pub(crate) fn dtype(&self) -> &str {
        self.dtype.as_deref().unwrap_or("auto")
    }
}

impl VerifyArgs {
    /// The workers of a comparison: exact unless something else is asked for.
    pub(crate) fn world(&self) -> WorldArgs {
        let mut world = self.world.clone();
        world.dtype.get_or_insert_with(|| "f32".to_owned());
        world
    }
}

impl GenerateArgs {
    /// `--max-batch`, or what stands for it. On the CPU a batch gains a tenth on a small model and takes a multiple of the memory on a
    /// large one, so whole pictures come one by one; a wave of one step is made to be shared.
    pub(crate) fn max_batch(&self) -> usize {
        match (self.max_batch, self.mode) {
            (Some(max_batch), _) => max_batch as usize,
            (None, ModeName::Request) => 1,
            (None, ModeName::Step) => 4,
        }
    }
}

impl From<ModeName> for Mode {
    fn from(name: ModeName) -> Self {
        match name {
            ModeName::Request => Self::Request,
            ModeName::Step => Self::Step,
        }
    }
}

#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("text").required(true).args(["prompt", "prompts"])))]
pub(crate) struct GenerateArgs {
    /// What to draw; may be empty
    #[arg(value_name = "PROMPT")]
    pub(crate) prompt: Option<String>,

    /// Take the prompts from a file, one per line; `-` is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: Option<PathBuf>,

    /// File to write: PNG, for videos animated WebP; `-` is standard output (one only) [default: out.png, for videos out.webp]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Folder of the checkpoint, or `emoji-dit` or `emoji-unet`, which come along [default: emoji-dit]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,

    /// What to stay away from
    #[arg(long, value_name = "TEXT")]
    pub(crate) negative: Option<String>,

    /// Denoiser steps [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(GenerateRequest::MAX_STEPS)))]
    pub(crate) steps: Option<u32>,

    /// Guidance scale; for most models there is none at or below 1 [default: the model's]
    #[arg(long, value_name = "G", value_parser = parse_guidance, allow_negative_numbers = true)]
    pub(crate) guidance: Option<f32>,

    /// Width and height in pixels, such as 512x768 [default: the model's]
    #[arg(long, value_name = "WxH", value_parser = parse_size)]
    pub(crate) size: Option<(u32, u32)>,

    /// Seed of the noise [default: a random one, which is printed]
    #[arg(long, value_name = "S")]
    pub(crate) seed: Option<u64>,

    /// Pictures per prompt; picture i uses seed S + i
    #[arg(long = "n", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_IMAGES as i64))]
    pub(crate) n_images: u32,

    /// Picture to start from, to edit or to animate, as the model does; several for models that edit several
    #[arg(long = "image", value_name = "FILE")]
    pub(crate) images: Vec<PathBuf>,

    /// Repaint the picture where this one, of the same size, is bright
    #[arg(long, value_name = "FILE", requires = "images")]
    pub(crate) mask: Option<PathBuf>,

    /// How much of the picture is given up: 1 all, 0.3 little [default: the model's]
    #[arg(long, value_name = "S", value_parser = parse_strength, requires = "images")]
    pub(crate) strength: Option<f32>,

    /// Frames of a video [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) frames: Option<u32>,

    /// Frames per second of a video's file [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=240))]
    pub(crate) fps: Option<u32>,

    /// Guidance scale of the second denoiser, of models that have two [default: as --guidance]
    #[arg(long, value_name = "G", value_parser = parse_guidance, allow_negative_numbers = true)]
    pub(crate) guidance_2: Option<f32>,

    /// Guidance by the negative prompt beside --guidance, of models that take that one as an input; twice the time above 1
    #[arg(long, value_name = "G", value_parser = parse_guidance, allow_negative_numbers = true)]
    pub(crate) true_guidance: Option<f32>,

    /// Noise levels in place of the sampler's own, falling, one per step: 1.0,0.6,0.2
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) sigmas: Vec<f32>,

    /// Longest text in tokens, of models where it can be chosen [default: the model's]
    #[arg(long, value_name = "N")]
    pub(crate) max_sequence_length: Option<u32>,

    /// CLIP layers left out beyond the model's own choice
    #[arg(long, value_name = "N")]
    pub(crate) clip_skip: Option<u32>,

    /// Sampler, such as `euler-a` or `DPM++ 2M Karras`; `denoised samplers` lists them [default: the model's]
    #[arg(long, value_name = "NAME")]
    pub(crate) sampler: Option<String>,

    /// How a wave runs: whole pictures, or one step of each
    #[arg(long, value_name = "MODE", value_enum, default_value_t = ModeName::Request)]
    pub(crate) mode: ModeName,

    /// Most pictures that one worker computes at a time [default: 1 in request mode, 4 in step mode]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) max_batch: Option<u32>,

    /// Write what every worker did and when to this file, as a trace that Perfetto and Chrome show
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) world: WorldArgs,

    /// One JSON object per picture on stdout instead of text
    #[arg(long)]
    pub(crate) json: bool,

    /// No progress and no text, only errors
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct SamplersArgs {
    /// One JSON object per sampler
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Folder of the case
    #[arg(value_name = "CASE")]
    pub(crate) case: PathBuf,

    #[command(flatten)]
    pub(crate) world: WorldArgs,

    /// How a wave runs: whole pictures, or one step of each
    #[arg(long, value_name = "MODE", value_enum, default_value_t = ModeName::Request)]
    pub(crate) mode: ModeName,

    /// Run the case once more with N other requests in its waves
    #[arg(long = "share", value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=64))]
    pub(crate) n_sharing: u16,

    /// Write what every worker did and when to this file, as a trace that Perfetto and Chrome show
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,

    /// Write our tensors to this safetensors file
    #[arg(long, value_name = "FILE")]
    pub(crate) dump: Option<PathBuf>,

    /// The result as one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: BenchWhat,

    /// The figures as one JSON object instead of text
    #[arg(long, global = true, display_order = 800)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum BenchWhat {
    /// Latency and throughput of the shared-memory ring, beside the raw limits of this machine
    Ring(IdleArgs),
    /// Round trips of typed calls to one and more workers
    Executor(IdleArgs),
    /// One denoise step of a checkpoint
    Step(BenchModelArgs),
    /// Memory of all processes together while every worker makes a picture
    Memory(BenchModelArgs),
}

#[derive(Clone, Debug, Args)]
pub(crate) struct IdleArgs {
    /// For how many seconds idle workers are watched
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) idle_seconds: u64,
}

/// What is measured with a model.
#[derive(Clone, Debug, Args)]
pub(crate) struct BenchModelArgs {
    /// Folder of the checkpoint, or `emoji-dit` or `emoji-unet`, which come along [default: emoji-dit]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,

    /// Width and height in pixels [default: the model's]
    #[arg(long, value_name = "WxH", value_parser = parse_size)]
    pub(crate) size: Option<(u32, u32)>,

    /// Guidance scale; above 1 each step computes two predictions [default: the model's]
    #[arg(long, value_name = "G", value_parser = parse_guidance, allow_negative_numbers = true)]
    pub(crate) guidance: Option<f32>,

    /// Steps that are measured; `bench step` runs one more before them
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=900))]
    pub(crate) steps: u32,

    #[command(flatten)]
    pub(crate) world: WorldArgs,
}

fn parse_guidance(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value.is_finite() => Ok(value),
        Ok(_) => Err("must be a finite number".to_owned()),
        Err(_) => Err("not a number".to_owned()),
    }
}

fn parse_strength(text: &str) -> Result<f32, String> {
    let strength: f32 = text.parse().map_err(|_| "expected a number".to_owned())?;
    match strength > 0.0 && strength <= 1.0 {
        true => Ok(strength),
        false => Err("expected a number above 0 and at most 1".to_owned()),
    }
}

fn parse_size(text: &str) -> Result<(u32, u32), String> {
    let side = |text: &str| text.trim().parse::<u32>().ok().filter(|&side| side > 0);
    let (width, height) = text
        .split_once(['x', 'X', '×'])
        .ok_or("expected WIDTHxHEIGHT in pixels, such as 512x768")?;
    match (side(width), side(height)) {
        (Some(width), Some(height)) => Ok((width, height)),
        _ => Err("expected two positive whole numbers, such as 512x768".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn generate(args: &[&str]) -> Result<GenerateArgs, clap::Error> {
        let cli = Cli::try_parse_from(["denoised", "generate"].iter().chain(args))?;
        match cli.command {
            Command::Generate(args) => Ok(*args),
            _ => unreachable!("the subcommand is given above"),
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_two_positive_numbers() {
        assert_eq!(parse_size("512x768"), Ok((512, 768)));
        assert_eq!(parse_size("64X64"), Ok((64, 64)));
        for bad in [
            "", "512", "512x", "x512", "0x64", "64x0", "-1x64", "1e3x64", "64x64x3",
        ] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn arguments_out_of_range_are_refused() {
        for bad in [
            &["p", "--steps", "0"][..],
            &["p", "--steps", "1001"],
            &["p", "--n", "0"],
            &["p", "--workers", "0"],
            &["p", "--threads", "0"],
            &["p", "--guidance", "NaN"],
            &["p", "--guidance", "inf"],
            &["p", "--seed", "-1"],
            &["p", "--prompts", "file"],
            &[],
        ] {
            assert!(generate(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn all_that_is_left_out_is_the_models_choice() {
        let args = generate(&["a red apple"]).unwrap();
        assert_eq!(
            (args.steps, args.guidance, args.size, args.seed),
            (None, None, None, None)
        );
        assert_eq!(
            (args.n_images, args.world.workers, args.world.executor.as_str()),
            (1, 1, "mp")
        );
        assert_eq!(generate(&["p", "--guidance", "-1"]).unwrap().guidance, Some(-1.0));
        assert_eq!(
            generate(&["p", "--seed", "18446744073709551615"]).unwrap().seed,
            Some(u64::MAX)
        );
    }
}
