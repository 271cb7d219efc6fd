//! `denoised samplers`: which samplers there are, and what others call them.

use crate::args::SamplersArgs;
use crate::error::Error;
use crate::output::write_stdout;
use denoised_sampler::{Kind, SamplerName, sampler_names};
use serde_json::json;
use std::fmt::Write;

/// Runs the command.
///
/// # Errors
/// The standard output is closed.
pub(crate) fn run(args: &SamplersArgs) -> Result<(), Error> {
    let names = sampler_names();
    let text = match args.json {
        true => names.iter().map(as_json).collect(),
        false => as_table(&names),
    };
    write_stdout(text.as_bytes())
}

fn models(kind: Kind) -> &'static str {
    match kind {
        Kind::Discrete => "discrete",
        Kind::Flow => "flow",
    }
}

fn as_json(name: &SamplerName) -> String {
    let line = json!({
        "name": name.name,
        "models": models(name.kind),
        "class": name.class,
        "aliases": name.aliases,
    });
    format!("{line}\n")
}

fn as_table(names: &[SamplerName]) -> String {
    let mut text = String::new();
    for kind in [Kind::Discrete, Kind::Flow] {
        let heading = match kind {
            Kind::Discrete => {
                "For models of discrete timesteps (Stable Diffusion 1 and 2, SDXL, PixArt, DiT):"
            }
            Kind::Flow => "\nFor flow models (Stable Diffusion 3, FLUX, Qwen-Image, Z-Image, Wan):",
        };
        let _ = writeln!(text, "{heading}");
        let of_kind = || names.iter().filter(|name| name.kind == kind);
        let width = of_kind().map(|name| name.name.len()).max().unwrap_or(0);
        for name in of_kind() {
            let mut others = vec![name.class.to_owned()];
            others.extend(name.aliases.iter().cloned());
            let _ = writeln!(text, "  {:width$}  {}", name.name, others.join(", "));
        }
    }
    text.push_str(
        "\nThe names behind a sampler's own mean the same; case, spaces, `-` and `_` do not count, and `++` is `pp`.\n\
         Without --sampler a model's own scheduler is taken.\n",
    );
    text
}
