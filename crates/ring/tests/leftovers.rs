//! Killed worlds leave nothing behind. The only test of its program, so that descriptors can be counted.

mod support;

use denoised_os::signal::Signal;
use denoised_ring::{ArenaHolder, ArenaOwner, ArenaSpec, RingMemory, RingSpec, Wait};
use std::os::fd::AsFd;
use support::{Peer, part, soon};

#[test]
fn child_main() {
    let Some((_, channel, fds)) = part() else { return };
    let mut fds = fds.into_iter();
    let mut reader = RingMemory::attach(fds.next().unwrap())
        .unwrap()
        .reader(0)
        .unwrap();
    let _arena = ArenaHolder::attach(fds.next().unwrap(), 0).unwrap();
    let _record = reader.read(Wait::Sleep, soon()).unwrap();
    channel.send(b"holding", &[], soon()).unwrap();
    std::thread::sleep(std::time::Duration::from_secs(600));
}

#[test]
fn twenty_killed_worlds_leave_no_descriptor_and_no_mapping() {
    let n_fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let n_mappings = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("leftover test")).count()
    };
    let n_fds_before = n_fds();
    for _ in 0..20 {
        let memory = RingMemory::create("leftover test", RingSpec { capacity_bytes: 4096 }, 1).unwrap();
        let spec = ArenaSpec {
            granule_bytes: 4096,
            n_granules: 4,
        };
        let arena = ArenaOwner::create("leftover test", spec, 0).unwrap();
        let mut writer = memory.writer(None).unwrap();
        let arena_fd = arena.fd().unwrap();
        let mut peer = Peer::start("hold", &[memory.as_fd(), arena_fd.as_fd()]);
        writer.write(&[b"x"], soon()).unwrap();
        assert_eq!(peer.hear(), "holding");
        assert!(n_mappings() > 0);
        peer.child.signal(Signal::KILL).unwrap();
        peer.child.wait(soon()).unwrap().unwrap();
    }
    assert_eq!((n_fds(), n_mappings()), (n_fds_before, 0));
}
