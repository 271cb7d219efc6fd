//! The methods of a scripted worker.

use super::{
    At, ScriptedStart,
    program::{Fate, Scripted, busy, exit},
};
use denoised_types::{Failure, FailureCode};
use denoised_worker::{ControlContext, MethodContext, Registry, RegistryError};
use std::time::Duration;

/// A scripted worker with its methods; arguments and numbers are text.
///
/// Data lane: `rank`, `world_size`, `n_threads`; `payload` (a number of bytes, which it returns); `sleep`, `busy` (milliseconds;
/// return their argument); `fail` (always, with the argument as text); `fail_on` (`rank text`: fails there, elsewhere returns the
/// text); `panic`, `exit`, `hang`; `add_adapter` (a name), `adapters`; `device_memory` (bytes); `step_cost` (see
/// [`denoised_worker::bench`]).
///
/// Control lane: `control_echo`; `control_payload` (a number of bytes, which it returns); `control_sleep` (milliseconds); `control_fail`,
/// `control_panic` (with the argument as text).
///
/// # Panics
/// Never: the names are distinct.
pub fn scripted_registry() -> Registry {
    register().expect("the names are distinct")
}

type Reply = Result<Vec<u8>, Failure>;

fn register() -> Result<Registry, RegistryError> {
    let registry = Registry::new(ScriptedStart)
        .method("rank", |context, _| Ok(context.rank().to_string().into_bytes()))?
        .method("world_size", |context, _| {
            Ok(context.world_size().to_string().into_bytes())
        })?
        .method("n_threads", |context, _| {
            let n_threads = context.config().n_threads;
            Ok(n_threads.map(|n| n.to_string()).unwrap_or_default().into_bytes())
        })?
        .method("payload", |context, args| {
            Ok(vec![context.rank().0 as u8; number(args) as usize])
        })?
        .method("sleep", |_, args| {
            std::thread::sleep(Duration::from_millis(number(args)));
            Ok(args.to_vec())
        })?
        .method("busy", |_, args| {
            busy(Duration::from_millis(number(args)));
            Ok(args.to_vec())
        })?
        .method("fail", |_, args| {
            Err(Failure::new(FailureCode::WorkerFailed, text(args)))
        })?
        .method("fail_on", fail_on)?
        .method("panic", |_, args| panic!("{}", text(args)))?
        .method("exit", |_, args| exit(i32::try_from(number(args)).unwrap_or(1)))?
        .method("hang", |_, _| {
            std::thread::sleep(Duration::from_secs(3600));
            Ok(Vec::new())
        })?
        .method("add_adapter", add_adapter)?
        .method("adapters", |context, _| {
            let names: Vec<String> = scripted(context)?.adapters.iter().cloned().collect();
            Ok(names.join(",").into_bytes())
        })?
        .method("device_memory", |context, _| {
            Ok(scripted(context)?.device.n_bytes().to_string().into_bytes())
        })?
        .control_method("control_echo", |_: &ControlContext<'_>, args| Ok(args.to_vec()))?
        .control_method("control_payload", |context, args| {
            Ok(vec![context.rank().0 as u8; number(args) as usize])
        })?
        .control_method("control_sleep", |_, args| {
            std::thread::sleep(Duration::from_millis(number(args)));
            Ok(args.to_vec())
        })?
        .control_method("control_fail", |_, args| {
            Err(Failure::new(FailureCode::WorkerFailed, text(args)))
        })?
        .control_method("control_panic", |_, args| panic!("{}", text(args)))?;
    denoised_worker::bench::register(registry)
}

fn text(args: &[u8]) -> String {
    String::from_utf8_lossy(args).into_owned()
}

fn number(args: &[u8]) -> u64 {
    text(args).trim().parse().unwrap_or(0)
}

fn scripted<'a>(context: &'a mut MethodContext<'_>) -> Result<&'a mut Scripted, Failure> {
    context
        .program()
        .ok_or_else(|| Failure::new(FailureCode::Internal, "the program is not a scripted one"))
}

fn fail_on(context: &mut MethodContext<'_>, args: &[u8]) -> Reply {
    let args = text(args);
    match args.split_once(' ') {
        Some((rank, text)) if rank.parse() == Ok(context.rank().0) => {
            Err(Failure::new(FailureCode::WorkerFailed, text))
        }
        Some((_, text)) => Ok(text.as_bytes().to_vec()),
        None => Err(Failure::new(FailureCode::InvalidRequest, "no rank and text")),
    }
}

fn add_adapter(context: &mut MethodContext<'_>, args: &[u8]) -> Reply {
    let name = text(args);
    let program = scripted(context)?;
    match program.strike(At::AddAdapter) {
        Fate::Fails(failure) | Fate::Dooms(failure) => Err(failure),
        Fate::Spared | Fate::Forgotten => {
            program.adapters.insert(name);
            Ok(Vec::new())
        }
    }
}
