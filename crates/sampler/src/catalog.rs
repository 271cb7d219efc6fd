//! Names of samplers: what a request, a `scheduler_config.json` and other programs call them, and which one a checkpoint asks for.
//!
//! R1. A name is a solver with the settings that set it apart; all else comes from the checkpoint's file, as `from_config` of diffusers
//!     would take it. The name without a suffix leaves the spacing of sigmas to the file.
//! R2. Case, spaces, hyphens and underscores do not count in a name, and `++` is `pp`.

use crate::{
    Sampler, SamplerError,
    config::{PredictionType, SamplerConfig, Solver, TimestepSpacing},
    ddim, ddpm, deis, dpm, dpm_single, euler, euler_ancestral, flow_euler, heun, kdpm2, lcm, lms, pndm,
    unipc,
};

/// What a denoiser was trained for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Discrete timesteps of a schedule of betas.
    Discrete,
    /// A rectified flow.
    Flow,
}

type Build = fn(Solver, &SamplerConfig) -> Result<Box<dyn Sampler>, SamplerError>;

/// A row of the catalog.
struct Row {
    kind: Kind,
    /// The name, and names of the same with another spacing.
    names: &'static [(&'static str, Suffix)],
    /// Class in diffusers.
    class: &'static str,
    /// What others call it.
    aliases: &'static [&'static str],
    /// Sets what sets it apart.
    adjust: fn(&mut SamplerConfig),
    build: Build,
}

/// How a name spaces noise levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Suffix {
    /// As the file says.
    AsWritten,
    Karras,
    Exponential,
    Beta,
    /// The timesteps, from the last training timestep down.
    Trailing,
}

impl Suffix {
    /// What names end in that others give.
    fn endings(self) -> &'static [&'static str] {
        match self {
            Self::AsWritten => &[""],
            Self::Karras => &["_karras"],
            Self::Exponential => &["_exponential"],
            Self::Beta => &["_beta"],
            // ComfyUI's visits the same timesteps but for their rounding.
            Self::Trailing => &["_trailing", "_sgm_uniform"],
        }
    }

    fn adjust(self, config: &mut SamplerConfig) {
        if self == Self::AsWritten {
            return;
        }
        config.use_karras_sigmas = Some(self == Self::Karras);
        config.use_exponential_sigmas = Some(self == Self::Exponential);
        config.use_beta_sigmas = Some(self == Self::Beta);
        config.use_lu_lambdas = Some(false);
        if self == Self::Trailing {
            config.timestep_spacing = Some(TimestepSpacing::Trailing);
        }
    }
}

/// A name alone.
macro_rules! plain {
    ($name:literal) => {
        &[($name, Suffix::AsWritten)]
    };
}

/// A name and one for timesteps from the last down.
macro_rules! trailed {
    ($name:literal) => {
        &[
            ($name, Suffix::AsWritten),
            (concat!($name, "-trailing"), Suffix::Trailing),
        ]
    };
}

/// A name and those for spacings of sigmas.
macro_rules! spaced {
    ($name:literal) => {
        &[
            ($name, Suffix::AsWritten),
            (concat!($name, "-karras"), Suffix::Karras),
            (concat!($name, "-exponential"), Suffix::Exponential),
            (concat!($name, "-beta"), Suffix::Beta),
        ]
    };
}

/// All of them.
macro_rules! spaced_and_trailed {
    ($name:literal) => {
        &[
            ($name, Suffix::AsWritten),
            (concat!($name, "-karras"), Suffix::Karras),
            (concat!($name, "-exponential"), Suffix::Exponential),
            (concat!($name, "-beta"), Suffix::Beta),
            (concat!($name, "-trailing"), Suffix::Trailing),
        ]
    };
}

fn unchanged(_: &mut SamplerConfig) {}

fn dpm_plus_plus(config: &mut SamplerConfig) {
    config.algorithm_type = Some("dpmsolver++".to_owned());
}

fn dpm_plus_plus_sde(config: &mut SamplerConfig) {
    config.algorithm_type = Some("sde-dpmsolver++".to_owned());
}

fn dpm_plus_plus_3m_sde(config: &mut SamplerConfig) {
    dpm_plus_plus_sde(config);
    config.solver_order = Some(3);
}

fn dpm_solver(config: &mut SamplerConfig) {
    config.algorithm_type = Some("dpmsolver".to_owned());
}

fn dpm_solver_sde(config: &mut SamplerConfig) {
    config.algorithm_type = Some("sde-dpmsolver".to_owned());
}

/// Another solver for a flow than the checkpoint's is told so; shifts have two names.
fn flow_sigmas(config: &mut SamplerConfig) {
    config.use_flow_sigmas = Some(true);
    config.prediction_type = Some(PredictionType::Flow);
    config.flow_shift = config.flow_shift.or(config.shift);
}

fn flow_sigmas_sde(config: &mut SamplerConfig) {
    flow_sigmas(config);
    dpm_plus_plus_sde(config);
}

fn flow_sigmas_plus_plus(config: &mut SamplerConfig) {
    flow_sigmas(config);
    dpm_plus_plus(config);
}

fn flow_shift(config: &mut SamplerConfig) {
    config.shift = config.shift.or(config.flow_shift);
}

macro_rules! build {
    ($sampler:path) => {
        |solver, config| Ok(Box::new(<$sampler>::new(solver, config)?))
    };
}

const ROWS: &[Row] = &[
    Row {
        kind: Kind::Discrete,
        names: trailed!("ddim"),
        class: ddim::CLASS,
        aliases: &[],
        adjust: unchanged,
        build: build!(ddim::Ddim),
    },
    Row {
        kind: Kind::Discrete,
        names: plain!("ddpm"),
        class: ddpm::CLASS,
        aliases: &[],
        adjust: unchanged,
        build: build!(ddpm::Ddpm),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced_and_trailed!("euler"),
        class: euler::CLASS,
        aliases: &["k_euler"],
        adjust: unchanged,
        build: build!(euler::Euler),
    },
    Row {
        kind: Kind::Discrete,
        names: trailed!("euler-a"),
        class: euler_ancestral::CLASS,
        aliases: &["euler_ancestral", "k_euler_a"],
        adjust: unchanged,
        build: build!(euler_ancestral::EulerAncestral),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced!("heun"),
        class: heun::CLASS,
        aliases: &["k_heun"],
        adjust: unchanged,
        build: build!(heun::Heun),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced_and_trailed!("dpm++-2m"),
        class: dpm::CLASS,
        aliases: &["k_dpmpp_2m"],
        adjust: dpm_plus_plus,
        build: build!(dpm::Dpm),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced!("dpm++-2m-sde"),
        class: dpm::CLASS,
        aliases: &["k_dpmpp_2m_sde", "dpmpp_2m_sde_gpu"],
        adjust: dpm_plus_plus_sde,
        build: build!(dpm::Dpm),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced!("dpm++-3m-sde"),
        class: dpm::CLASS,
        aliases: &["k_dpmpp_3m_sde", "dpmpp_3m_sde_gpu"],
        adjust: dpm_plus_plus_3m_sde,
        build: build!(dpm::Dpm),
    },
    Row {
        kind: Kind::Discrete,
        names: plain!("dpm-solver"),
        class: dpm::CLASS,
        aliases: &[],
        adjust: dpm_solver,
        build: build!(dpm::Dpm),
    },
    Row {
        kind: Kind::Discrete,
        names: plain!("dpm-solver-sde"),
        class: dpm::CLASS,
        aliases: &[],
        adjust: dpm_solver_sde,
        build: build!(dpm::Dpm),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced!("dpm++-2s"),
        class: dpm_single::CLASS,
        aliases: &[],
        adjust: dpm_plus_plus,
        build: build!(dpm_single::DpmSingle),
    },
    Row {
        kind: Kind::Discrete,
        names: plain!("dpm-solver-2s"),
        class: dpm_single::CLASS,
        aliases: &[],
        adjust: dpm_solver,
        build: build!(dpm_single::DpmSingle),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced!("dpm++-sde"),
        class: dpm_single::CLASS,
        aliases: &["k_dpmpp_sde", "dpmpp_sde_gpu"],
        adjust: dpm_plus_plus_sde,
        build: build!(dpm_single::DpmSingle),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced_and_trailed!("unipc"),
        class: unipc::CLASS,
        aliases: &["uni_pc_bh2"],
        adjust: unchanged,
        build: build!(unipc::Unipc),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced!("dpm2"),
        class: kdpm2::CLASS,
        aliases: &["dpm_2", "k_dpm_2"],
        adjust: unchanged,
        build: build!(kdpm2::Kdpm2),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced!("dpm2-a"),
        class: kdpm2::ANCESTRAL_CLASS,
        aliases: &["dpm_2_ancestral", "k_dpm_2_a"],
        adjust: unchanged,
        build: build!(kdpm2::Kdpm2),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced!("lms"),
        class: lms::CLASS,
        aliases: &["k_lms"],
        adjust: unchanged,
        build: build!(lms::Lms),
    },
    Row {
        kind: Kind::Discrete,
        names: spaced!("deis"),
        class: deis::CLASS,
        aliases: &[],
        adjust: unchanged,
        build: build!(deis::Deis),
    },
    Row {
        kind: Kind::Discrete,
        names: plain!("pndm"),
        class: pndm::CLASS,
        aliases: &["plms"],
        adjust: unchanged,
        build: build!(pndm::Pndm),
    },
    Row {
        kind: Kind::Discrete,
        names: plain!("lcm"),
        class: lcm::CLASS,
        aliases: &[],
        adjust: unchanged,
        build: build!(lcm::Lcm),
    },
    Row {
        kind: Kind::Discrete,
        names: plain!("tcd"),
        class: lcm::TCD_CLASS,
        aliases: &[],
        adjust: unchanged,
        build: build!(lcm::Tcd),
    },
    Row {
        kind: Kind::Flow,
        names: spaced!("flow-euler"),
        class: flow_euler::CLASS,
        aliases: &["euler", "k_euler", "EulerDiscreteScheduler"],
        adjust: flow_shift,
        build: build!(flow_euler::FlowEuler),
    },
    Row {
        kind: Kind::Flow,
        names: plain!("flow-heun"),
        class: heun::FLOW_CLASS,
        aliases: &["heun", "k_heun", "HeunDiscreteScheduler"],
        adjust: flow_shift,
        build: build!(heun::FlowHeun),
    },
    Row {
        kind: Kind::Flow,
        names: plain!("unipc"),
        class: unipc::CLASS,
        aliases: &["uni_pc_bh2"],
        adjust: flow_sigmas,
        build: build!(unipc::Unipc),
    },
    Row {
        kind: Kind::Flow,
        names: plain!("dpm++-2m"),
        class: dpm::CLASS,
        aliases: &["k_dpmpp_2m"],
        adjust: flow_sigmas_plus_plus,
        build: build!(dpm::Dpm),
    },
    Row {
        kind: Kind::Flow,
        names: plain!("dpm++-2m-sde"),
        class: dpm::CLASS,
        aliases: &["k_dpmpp_2m_sde", "dpmpp_2m_sde_gpu"],
        adjust: flow_sigmas_sde,
        build: build!(dpm::Dpm),
    },
    Row {
        kind: Kind::Flow,
        names: plain!("deis"),
        class: deis::CLASS,
        aliases: &[],
        adjust: flow_sigmas_plus_plus,
        build: build!(deis::Deis),
    },
];

/// A sampler's name and what else it answers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplerName {
    /// The name.
    pub name: &'static str,
    /// For which denoisers.
    pub kind: Kind,
    /// Class in diffusers.
    pub class: &'static str,
    /// Further names, without that class.
    pub aliases: Vec<String>,
}

/// All samplers, those of discrete timesteps first.
pub fn sampler_names() -> Vec<SamplerName> {
    let mut names = Vec::new();
    for row in ROWS {
        for (name, suffix) in row.names {
            let aliases = suffix.endings().iter().flat_map(|ending| {
                let own = (row.names[0].0, *ending);
                let others = row.aliases.iter().map(|alias| (*alias, *ending));
                std::iter::once(own).chain(others)
            });
            let aliases = aliases.map(|(alias, ending)| format!("{alias}{ending}"));
            let aliases = aliases.filter(|alias| essence(alias) != essence(name)).collect();
            names.push(SamplerName {
                name,
                kind: row.kind,
                class: row.class,
                aliases,
            });
        }
    }
    names
}

/// What counts of a name.
fn essence(name: &str) -> String {
    let lower = name.to_lowercase().replace("++", "pp");
    lower.chars().filter(|c| !" -_".contains(*c)).collect()
}

/// The one of `available` that `asked` means, whoever's name it is.
pub fn find_sampler<'a>(asked: &str, available: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let available: Vec<&str> = available.into_iter().collect();
    let asked = essence(asked);
    if let Some(name) = available.iter().find(|name| essence(name) == asked) {
        return Some(name);
    }
    let mut matching = sampler_names().into_iter().filter(|row| {
        let is_alias = row.aliases.iter().any(|alias| essence(alias) == asked);
        // A class means its first name.
        let is_class = essence(row.class) == asked;
        is_alias || is_class
    });
    matching.find_map(|row| available.iter().find(|name| **name == row.name).copied())
}

/// Names for a reader: those that differ in their spacing only are one entry, as in `euler[-karras|-beta]`.
pub fn summarize_samplers<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    let base_of = |name: &str| {
        let row = ROWS
            .iter()
            .find(|row| row.names.iter().any(|(other, _)| *other == name));
        row.map_or(name.to_owned(), |row| row.names[0].0.to_owned())
    };
    let mut entries: Vec<(String, Vec<&str>)> = Vec::new();
    for name in names {
        let base = base_of(name);
        let ending = name.strip_prefix(&base).unwrap_or_default();
        match entries.iter_mut().find(|(other, _)| *other == base) {
            Some((_, endings)) => endings.push(ending),
            None => entries.push((base, vec![ending])),
        }
    }
    let entry = |(base, endings): (String, Vec<&str>)| {
        let suffixes: Vec<&str> = endings
            .iter()
            .copied()
            .filter(|ending| !ending.is_empty())
            .collect();
        match suffixes[..] {
            [] => base,
            // The plain name is always offered beside the others, unless the file's own spacing cannot be carried out.
            _ if suffixes.len() == endings.len() => format!("{base}({})", suffixes.join("|")),
            _ => format!("{base}[{}]", suffixes.join("|")),
        }
    };
    let entries: Vec<String> = entries.into_iter().map(entry).collect();
    entries.join(", ")
}

/// The sampler called `name`, exactly, with a checkpoint's settings; `None` if there is none.
///
/// # Errors
/// [`SamplerError::Unsupported`] for a setting that would change the result and is not implemented, [`SamplerError::Invalid`] for
/// numbers that make no schedule.
pub fn build_sampler(
    kind: Kind,
    name: &str,
    config: &SamplerConfig,
) -> Option<Result<Box<dyn Sampler>, SamplerError>> {
    ROWS.iter().filter(|row| row.kind == kind).find_map(|row| {
        let (name, suffix) = row.names.iter().find(|(other, _)| *other == name)?;
        let solver = Solver {
            class: row.class,
            name,
        };
        let mut config = config.clone();
        (row.adjust)(&mut config);
        suffix.adjust(&mut config);
        Some((row.build)(solver, &config))
    })
}

/// Name of the sampler that a checkpoint with a scheduler of this class asks for; `None` if nothing here carries it out.
pub fn own_sampler(kind: Kind, class: &str, config: &SamplerConfig) -> Option<&'static str> {
    let mut of_class = ROWS.iter().filter(|row| row.kind == kind && row.class == class);
    // Its settings are to be those of the file: the row must change none.
    let own = of_class.find(|row| {
        let mut adjusted = config.clone();
        (row.adjust)(&mut adjusted);
        let algorithm = |config: &SamplerConfig| {
            let name = config.algorithm_type.as_deref();
            name.filter(|name| *name != "deis")
                .unwrap_or("dpmsolver++")
                .to_owned()
        };
        let has_algorithms = [dpm::CLASS, dpm_single::CLASS].contains(&row.class);
        algorithm(&adjusted) == algorithm(config) || !has_algorithms
    });
    own.map(|row| row.names[0].0)
}

/// All names of a kind, in the order of the catalog.
pub fn names_of(kind: Kind) -> impl Iterator<Item = &'static str> {
    let rows = ROWS.iter().filter(move |row| row.kind == kind);
    rows.flat_map(|row| row.names.iter().map(|(name, _)| *name))
}
