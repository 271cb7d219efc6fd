//! Oversized messages.

use super::{relay::start_with_relay, *};
use denoised_testkit::script::scripted_registry;
use denoised_types::FailureCode;
use denoised_worker::Registry;
use std::sync::atomic::AtomicU64;

const BLOCK_BYTES: usize = 1 << 20;

/// The methods of the workers here.
///
/// `throttled` looks at its arguments block by block, as [`blocks`] makes them, and sleeps for so many milliseconds after each as the first
/// block says; `in_turn` only returns. Both return how many of them have returned on this rank so far. `view` returns the beginning of
/// a large buffer.
pub(crate) fn registry() -> Registry {
    let n_returned = || {
        static N_RETURNED: AtomicU64 = AtomicU64::new(0);
        Ok(N_RETURNED.fetch_add(1, Ordering::SeqCst).to_string().into_bytes())
    };
    let registry = scripted_registry().method("throttled", move |_, args| {
        let pause_ms = args.get(8).copied().unwrap_or_default();
        for (idx, block) in args.chunks(BLOCK_BYTES).enumerate() {
            if !is_block(block, idx, pause_ms) {
                let text = format!("block {idx} is not what was sent");
                return Err(Failure::new(FailureCode::Internal, text));
            }
            std::thread::sleep(Duration::from_millis(pause_ms.into()));
        }
        n_returned()
    });
    let registry = registry.and_then(|registry| registry.method("in_turn", move |_, _| n_returned()));
    let registry = registry.and_then(|registry| {
        registry.method("view", |_, _| {
            let mut buffer = vec![7; 256 << 20];
            buffer.truncate(1024);
            Ok(buffer)
        })
    });
    let registry = registry.expect("the names are distinct");
    match std::env::var(super::methods::EXTENSION) {
        Ok(extension) => super::methods::extended(registry, &extension),
        Err(_) => registry,
    }
}

/// Blocks of which each begins with its number and then with how long to pause.
fn blocks(n_blocks: usize, pause_ms: u8) -> Vec<u8> {
    let mut bytes = vec![0x5a; n_blocks * BLOCK_BYTES];
    for (idx, block) in bytes.chunks_mut(BLOCK_BYTES).enumerate() {
        block[..8].copy_from_slice(&(idx as u64).to_le_bytes());
        block[8] = pause_ms;
    }
    bytes
}

fn is_block(block: &[u8], idx: usize, pause_ms: u8) -> bool {
    block.len() == BLOCK_BYTES
        && block[..8] == (idx as u64).to_le_bytes()
        && block[8] == pause_ms
        // All bytes that follow are alike.
        && block[9] == 0x5a
        && block[9..BLOCK_BYTES - 1] == block[10..]
}

#[test]
fn l1_a_message_of_half_a_gigabyte_reaches_slow_readers_whole_and_in_its_turn() {
    let _watchdog = watchdog("l1");
    const N_BLOCKS: usize = 512;
    let mut options = options(4, &Script::default());
    options.link = LinkSpec {
        command_arena_bytes: N_BLOCKS * BLOCK_BYTES,
        ..options.link
    };
    let executor = start_with(options);
    let executor = &executor;
    let args = blocks(N_BLOCKS, 5);
    std::thread::scope(|scope| {
        let before = executor.stats().n_calls;
        let large = scope.spawn(|| executor.call(&MethodCall::new("throttled", &args, late())));
        // From then on it has its place in the order.
        assert!(eventually(soon(), || executor.stats().n_calls > before));
        for n_before in 1..=10u64 {
            let replies = executor.call(&MethodCall::new("in_turn", b"", late())).unwrap();
            let expected = n_before.to_string().into_bytes();
            assert!(replies.iter().all(|reply| reply.bytes == expected), "{replies:?}");
            assert_eq!(replies.len(), 4);
        }
        let replies = large.join().unwrap().unwrap();
        assert!(replies.iter().all(|reply| reply.bytes == b"0"), "{replies:?}");
        assert_eq!(replies.len(), 4);
    });
}

#[test]
fn l3_a_small_view_of_a_large_buffer_travels_alone() {
    let _watchdog = watchdog("l3");
    let spec = denoised_testkit::process::small_link();
    let (executor, n_bytes) = start_with_relay(spec, registry);
    let before = n_bytes.load(Ordering::Relaxed);
    let replies = executor.call(&MethodCall::new("view", b"", late())).unwrap();
    assert_eq!(replies[0].bytes, [7; 1024]);
    let moved = n_bytes.load(Ordering::Relaxed) - before;
    println!("a reply of 1 KiB moved {moved} bytes");
    assert!((1024..8 << 10).contains(&moved), "{moved}");
}
