//! A link that spoils messages and counts bytes: between a real executor and a real worker, both in this process.

use super::*;
use denoised_executor::{UniExecutor, UniOptions};
use denoised_link::{ControlInput, Received, Waiting, WorkerEnd, local_link};
use denoised_os::Deadline;
use denoised_worker::Registry;
use std::{
    ops::ControlFlow,
    sync::atomic::{AtomicBool, AtomicU64},
};

fn later() -> Deadline {
    Deadline::after_ms(60_000)
}

fn on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// An executor of one worker on a thread, and how many bytes of messages and blobs that worker has sent; what carries a spell is spoiled
/// on its way.
pub(crate) fn start_with_relay(spec: LinkSpec, registry: fn() -> Registry) -> (UniExecutor, Arc<AtomicU64>) {
    let n_bytes = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&n_bytes);
    let options = UniOptions {
        link: spec,
        start_limit: Duration::from_secs(60),
        ..UniOptions::new(Script::default().config())
    };
    let serve = Box::new(move |end| relay(spec, end, registry, &counted));
    (
        UniExecutor::start(options, serve, &mut |_, _| {}).unwrap(),
        n_bytes,
    )
}

/// Sits between an executor and a worker and spoils what contains a spell.
fn relay(spec: LinkSpec, outer: WorkerEnd, registry: fn() -> Registry, n_bytes: &AtomicU64) {
    let WorkerEnd {
        hello,
        boot,
        mut data,
        mut control,
        events,
    } = outer;
    let (inner, inner_boot, worker) = local_link(spec, hello.epoch, hello.config.clone()).unwrap();
    let (mut inner_data, inner_control, mut inner_events) = (inner.data, inner.control, inner.events);
    let is_over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            denoised_worker::serve(worker, registry());
            is_over.store(true, Ordering::SeqCst);
        });
        scope.spawn(move || {
            while let Ok(message) = inner_boot.receive(later()) {
                boot.send(&message, None).unwrap();
            }
        });
        scope.spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                if let Ok(ControlInput::Message(message)) = control.receive(Deadline::after_ms(5)) {
                    inner_control[0].send(&message).unwrap_or(());
                }
            }
        });
        scope.spawn(move || {
            while !is_over.load(Ordering::SeqCst) || inner_events.wait(Deadline::PASSED) == Waiting::Ready {
                inner_events.wait(Deadline::after_ms(5));
                let drained = inner_events.drain(&mut |_, received| {
                    let (message, blobs) = spoiled(received);
                    let blobs: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
                    let n = message.len() + blobs.iter().map(|blob| blob.len()).sum::<usize>();
                    n_bytes.fetch_add(n as u64, Ordering::Relaxed);
                    events.send(&message, &blobs, later(), &mut on).unwrap();
                });
                drained.unwrap();
            }
        });
        scope.spawn(move || {
            let to = denoised_link::RankSet::one(Rank(0));
            while !is_over.load(Ordering::SeqCst) {
                if let Ok(received) = data.receive(Deadline::after_ms(5)) {
                    let (message, blobs) = spoiled(received);
                    let blobs: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
                    inner_data.send(to, &message, &blobs, later(), &mut on).unwrap();
                }
            }
        });
    });
}

/// What becomes of a message that carries a spell in its first blob (the arguments or the reply of `echo`).
fn spoiled(received: Received) -> (Vec<u8>, Vec<Vec<u8>>) {
    let Received { message, blobs } = received;
    let mut message = message.into_vec();
    let mut blobs: Vec<Vec<u8>> = blobs.into_iter().map(|blob| blob.into_vec()).collect();
    let is_command = message[14..16] == [0, 0] && message.len() > 28;
    let spell = blobs
        .first()
        .map(|blob| String::from_utf8_lossy(blob).into_owned())
        .unwrap_or_default();
    match (spell.as_str(), is_command) {
        // 24 bytes of header come first.
        ("command of no kind", true) => message[24] = 0x7f,
        ("command cut short", true) => message.truncate(message.len() - 1),
        ("command too long", true) => message.push(0),
        ("command of a newer version", true) => {
            message[..2].copy_from_slice(&(denoised_wire::PROTOCOL_VERSION + 1).to_le_bytes());
        }
        ("command without its blob", true) => blobs.clear(),
        ("event of no kind", false) => message[24] = 0x7f,
        ("event cut short", false) => message.truncate(message.len() - 1),
        ("event without its blob", false) => blobs.clear(),
        _ => {}
    }
    (message, blobs)
}
