//! Messages that one side does not understand: answered with a typed failure, at once, and the next one works (fault case E5).

use denoised_executor::{Executor, ExecutorError, LinkSpec, MethodCall, UniExecutor, UniOptions};
use denoised_link::{ControlInput, Received, Waiting, WorkerEnd, local_link};
use denoised_os::Deadline;
use denoised_testkit::{
    process::small_link,
    script::{Script, scripted_registry},
    watchdog::Watchdog,
};
use denoised_types::{FailureCode, Rank};
use denoised_wire::PROTOCOL_VERSION;
use std::{
    ops::ControlFlow,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

fn late() -> Deadline {
    Deadline::after_ms(60_000)
}

fn on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Sits between an executor and a worker and spoils what contains a spell.
fn relay(spec: LinkSpec, outer: WorkerEnd) {
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
            denoised_worker::serve(worker, scripted_registry());
            is_over.store(true, Ordering::SeqCst);
        });
        scope.spawn(move || {
            while let Ok(message) = inner_boot.receive(late()) {
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
                    events.send(&message, &blobs, late(), &mut on).unwrap();
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
                    inner_data.send(to, &message, &blobs, late(), &mut on).unwrap();
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
            message[..2].copy_from_slice(&(PROTOCOL_VERSION + 1).to_le_bytes());
        }
        ("command without its blob", true) => blobs.clear(),
        ("event of no kind", false) => message[24] = 0x7f,
        ("event cut short", false) => message.truncate(message.len() - 1),
        ("event without its blob", false) => blobs.clear(),
        _ => {}
    }
    (message, blobs)
}

#[test]
fn what_is_not_understood_is_answered_and_the_next_message_works() {
    let _watchdog = Watchdog::new("misunderstandings", Duration::from_secs(120));
    let spec = small_link();
    let options = UniOptions {
        link: spec,
        start_limit: Duration::from_secs(60),
        ..UniOptions::new(Script::default().config())
    };
    let executor =
        UniExecutor::start(options, Box::new(move |end| relay(spec, end)), &mut |_, _| {}).unwrap();
    let call = |args: &str| {
        executor.call(&MethodCall::new(
            "echo",
            args.as_bytes(),
            Instant::now() + Duration::from_secs(60),
        ))
    };
    let versions = format!(
        "protocol version {}, this program speaks version {PROTOCOL_VERSION}",
        PROTOCOL_VERSION + 1
    );
    let spells = [
        ("command of no kind", "no command"),
        ("command cut short", "no command"),
        ("command too long", "left over behind a command"),
        ("command of a newer version", versions.as_str()),
        ("command without its blob", "did not come with it"),
        ("event of no kind", "no event"),
        ("event cut short", "no event"),
        ("event without its blob", "did not come with its answer"),
    ];
    for (spell, text) in spells {
        match call(spell) {
            Err(ExecutorError::Rank { failure, succeeded }) => {
                assert_eq!(
                    (failure.code, failure.rank),
                    (FailureCode::Protocol, Some(Rank(0))),
                    "{spell}"
                );
                assert!(failure.message.contains(text), "{spell}: {failure}");
                assert!(succeeded.is_empty());
            }
            other => panic!("{spell}: {other:?}"),
        }
        assert_eq!(call("a plain word").unwrap()[0].bytes, b"a plain word");
    }
    assert_eq!(executor.failure(), None);
    executor.shutdown(Duration::from_secs(20));
}
