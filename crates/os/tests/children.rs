//! Children as a parent sees them. Each test starts this test program once more, where `child_main`
//! plays the part that the environment names.

use denoised_os::child::{Child, ExitStatus, Spawn, inherited_fd, kill_all};
use denoised_os::memfd::{Access, SealedMemory};
use denoised_os::poll::wait_readable;
use denoised_os::signal::Signal;
use denoised_os::socket::{Channel, ChannelError};
use denoised_os::{Deadline, OsError};
use std::io::Read;
use std::os::fd::AsFd;
use std::time::Duration;

const PART: &str = "DENOISED_OS_TEST_PART";

fn spawn(part: &str) -> Spawn {
    let this_program = Spawn::this_program().unwrap();
    this_program
        .arg("--exact")
        .arg("child_main")
        .arg("--nocapture")
        .env(PART, part)
}

fn start(part: &str) -> Child {
    spawn(part).start().unwrap()
}

fn soon() -> Deadline {
    Deadline::after_ms(60_000)
}

fn end_of(child: &Child) -> ExitStatus {
    child.wait(soon()).unwrap().expect("the child ends")
}

#[test]
#[expect(clippy::exit, reason = "a child's exit code is what is tested")]
fn child_main() {
    let Ok(part) = std::env::var(PART) else { return };
    match part.as_str() {
        "exit 3" => std::process::exit(3),
        "sleep" => std::thread::sleep(Duration::from_secs(600)),
        "complain" => {
            std::io::Write::write_all(&mut std::io::stderr(), b"no such weights\n").unwrap();
            std::process::exit(1);
        }
        "echo" => {
            let channel = Channel::from_fd(inherited_fd("link").unwrap()).unwrap();
            assert!(inherited_fd("link").is_err(), "taken twice");
            assert!(inherited_fd("other").is_err(), "never passed");
            let received = channel.receive(soon()).unwrap();
            let memory = SealedMemory::from_fd(received.fds.into_iter().next().unwrap()).unwrap();
            let mapping = memory.map(Access::ReadWrite).unwrap();
            // SAFETY: the first byte of a writable mapping; the parent reads it after the answer.
            unsafe { mapping.as_ptr().write_volatile(received.bytes[0]) };
            channel.send(b"done", &[], soon()).unwrap();
            // Ends when the parent's end of the channel is gone.
            assert!(channel.wait_closed(soon()).unwrap());
            std::process::exit(0);
        }
        "descriptors" => {
            let channel = Channel::from_fd(inherited_fd("link").unwrap()).unwrap();
            let mut targets = Vec::new();
            for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
                if let Ok(target) = std::fs::read_link(entry.unwrap().path()) {
                    targets.push(target.to_string_lossy().into_owned());
                }
            }
            let sockets = targets
                .iter()
                .filter(|target| target.starts_with("socket:"))
                .count();
            channel
                .send(format!("{sockets}").as_bytes(), &[], soon())
                .unwrap();
            std::process::exit(0);
        }
        "grandparent" => {
            // The variable is still set here, but the descriptor is taken and closed on exec.
            let _link = inherited_fd("link").unwrap();
            let grandchild = start("grandchild");
            let code = if end_of(&grandchild) == ExitStatus::Code(0) {
                0
            } else {
                9
            };
            std::process::exit(code);
        }
        "grandchild" => std::process::exit(i32::from(inherited_fd("link").is_ok())),
        "deaf to INT" => {
            let channel = Channel::from_fd(inherited_fd("link").unwrap()).unwrap();
            channel.send(b"up", &[], soon()).unwrap();
            let _ = channel.wait_closed(soon());
            std::process::exit(0);
        }
        "kills all" => {
            let (stopped, ended, running) = (start("sleep"), start("exit 3"), start("sleep"));
            stopped.signal(Signal::STOP).unwrap();
            assert_eq!(end_of(&ended), ExitStatus::Code(3));
            assert!(kill_all(soon()));
            for child in [&stopped, &running] {
                assert!(
                    !std::fs::exists(format!("/proc/{}", child.pid())).unwrap(),
                    "reaped"
                );
                assert_eq!(
                    end_of(child),
                    ExitStatus::Signal(Signal::KILL),
                    "its owner hears it too"
                );
            }
            let error = spawn("sleep").start().unwrap_err();
            assert!(error.to_string().contains("this program is ending"), "{error}");
            assert!(kill_all(Deadline::PASSED), "none is left");
            std::process::exit(0);
        }
        "parent of a stopped child" => {
            let child = spawn("sleep").end_with_thread().start().unwrap();
            child.signal(Signal::STOP).unwrap();
            let channel = Channel::from_fd(inherited_fd("link").unwrap()).unwrap();
            channel
                .send(child.pid().to_string().as_bytes(), &[], soon())
                .unwrap();
            std::thread::sleep(Duration::from_secs(600));
        }
        other => panic!("unknown part {other}"),
    }
}

#[test]
fn the_status_is_the_true_one_every_time() {
    for _ in 0..25 {
        let killed = start("sleep");
        assert!(killed.signal(Signal::KILL).unwrap());
        assert_eq!(end_of(&killed), ExitStatus::Signal(Signal::KILL));
        assert!(
            !killed.signal(Signal::TERM).unwrap(),
            "an ended child is not signalled"
        );
    }
    let exited = start("exit 3");
    assert_eq!(end_of(&exited), ExitStatus::Code(3));
    assert_eq!(end_of(&exited), ExitStatus::Code(3), "a status is kept");
    assert_eq!(
        ExitStatus::Signal(Signal::KILL).to_string(),
        "killed by signal 9 (SIGKILL)"
    );
    assert_eq!(ExitStatus::Code(3).to_string(), "exited with code 3");
}

#[test]
fn waiting_ends_at_the_deadline_and_a_stopped_child_is_alive() {
    let child = start("sleep");
    assert_eq!(child.wait(Deadline::PASSED).unwrap(), None);
    child.signal(Signal::STOP).unwrap();
    assert_eq!(child.wait(Deadline::after_ms(50)).unwrap(), None);
    child.signal(Signal::CONT).unwrap();
    child.signal(Signal::TERM).unwrap();
    assert_eq!(end_of(&child), ExitStatus::Signal(Signal::TERM));
}

#[test]
fn a_dropped_child_is_gone() {
    let child = start("sleep");
    let folder = format!("/proc/{}", child.pid());
    assert!(std::fs::exists(&folder).unwrap());
    drop(child);
    assert!(!std::fs::exists(&folder).unwrap(), "killed and reaped");
}

#[test]
fn killing_all_ends_and_reaps_every_child_and_lets_no_other_start() {
    assert_eq!(end_of(&start("kills all")), ExitStatus::Code(0));
}

#[test]
fn a_child_ends_with_the_thread_that_started_it_if_so_asked() {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let ending = spawn("sleep").end_with_thread().start().unwrap();
        sender.send((ending, start("sleep"))).unwrap();
    })
    .join()
    .unwrap();
    let (ending, staying) = receiver.recv().unwrap();
    assert_eq!(end_of(&ending), ExitStatus::Signal(Signal::KILL));
    assert_eq!(staying.wait(Deadline::after_ms(50)).unwrap(), None);
}

#[test]
fn a_stopped_child_ends_with_a_killed_parent_if_so_asked() {
    let (ours, theirs) = Channel::pair().unwrap();
    let parent = spawn("parent of a stopped child")
        .pass_fd("link", theirs.into_fd())
        .start()
        .unwrap();
    let pid = String::from_utf8(ours.receive(soon()).unwrap().bytes).unwrap();
    let is_there = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // Its new parent may take its time to reap it.
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| !rest.starts_with('Z'))
    };
    assert!(is_there());
    parent.signal(Signal::KILL).unwrap();
    assert_eq!(end_of(&parent), ExitStatus::Signal(Signal::KILL));
    let until = soon();
    while is_there() {
        assert!(!until.has_passed(), "process {pid} outlived its parent");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn many_children_are_watched_together() {
    let (slow, quick) = (start("sleep"), start("exit 3"));
    let ready = wait_readable(&[slow.as_fd(), quick.as_fd()], soon()).unwrap();
    assert_eq!(ready, [false, true]);
    assert_eq!(
        [slow.try_wait().unwrap(), quick.try_wait().unwrap()],
        [None, Some(ExitStatus::Code(3))]
    );
}

#[test]
fn standard_error_comes_back() {
    let mut child = start("complain");
    let mut text = String::new();
    std::fs::File::from(child.take_stderr().unwrap())
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "no such weights\n");
    assert!(child.take_stderr().is_none());
    assert_eq!(end_of(&child), ExitStatus::Code(1));
}

#[test]
fn a_channel_hands_over_memory_and_is_the_lifeline() {
    let (ours, theirs) = Channel::pair().unwrap();
    let child = spawn("echo").pass_fd("link", theirs.into_fd()).start().unwrap();
    let memory = SealedMemory::create("test", 4096).unwrap();
    let mapping = memory.map(Access::ReadWrite).unwrap();
    ours.send(&[42], &[memory.as_fd()], soon()).unwrap();
    assert_eq!(ours.receive(soon()).unwrap().bytes, b"done");
    // SAFETY: the first byte of a live mapping; the child wrote it before it answered.
    assert_eq!(unsafe { mapping.as_ptr().read_volatile() }, 42);
    assert_eq!(child.wait(Deadline::PASSED).unwrap(), None);
    drop(ours);
    assert_eq!(end_of(&child), ExitStatus::Code(0));
}

#[test]
fn a_dead_childs_channel_is_closed() {
    let (ours, theirs) = Channel::pair().unwrap();
    let child = spawn("sleep").pass_fd("link", theirs.into_fd()).start().unwrap();
    child.signal(Signal::KILL).unwrap();
    assert!(matches!(ours.receive(soon()), Err(ChannelError::Closed)));
}

#[test]
fn a_child_inherits_no_siblings_descriptor() {
    let pairs: Vec<_> = (0..4).map(|_| Channel::pair().unwrap()).collect();
    let mut parents = Vec::new();
    let mut children = Vec::new();
    for (ours, theirs) in pairs {
        parents.push(ours);
        children.push(
            spawn("descriptors")
                .pass_fd("link", theirs.into_fd())
                .start()
                .unwrap(),
        );
    }
    for ours in &parents {
        assert_eq!(ours.receive(soon()).unwrap().bytes, b"1", "one socket: its own");
    }
}

#[test]
fn a_variable_inherited_further_down_is_not_taken_for_a_descriptor() {
    let (_ours, theirs) = Channel::pair().unwrap();
    let child = spawn("grandparent")
        .pass_fd("link", theirs.into_fd())
        .start()
        .unwrap();
    assert_eq!(end_of(&child), ExitStatus::Code(0));
}

#[test]
fn an_ignored_interrupt_does_not_end_a_child() {
    let (ours, theirs) = Channel::pair().unwrap();
    let child = spawn("deaf to INT")
        .ignore(Signal::INT)
        .pass_fd("link", theirs.into_fd())
        .start()
        .unwrap();
    assert_eq!(ours.receive(soon()).unwrap().bytes, b"up");
    assert!(child.signal(Signal::INT).unwrap());
    assert_eq!(child.wait(Deadline::after_ms(50)).unwrap(), None);
    drop(ours);
    assert_eq!(end_of(&child), ExitStatus::Code(0));
}

#[test]
fn a_program_that_cannot_start_is_an_error_with_its_path() {
    let error = Spawn::new("/no/such/program".as_ref()).start().unwrap_err();
    assert!(error.to_string().contains("/no/such/program"), "{error}");
}

#[test]
fn a_child_is_shared_between_threads() -> Result<(), OsError> {
    let child = start("sleep");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| child.wait(soon()));
        child.signal(Signal::KILL)?;
        assert_eq!(waiter.join().unwrap()?, Some(ExitStatus::Signal(Signal::KILL)));
        Ok(())
    })
}
