//! Messages survive the trip, and no other bytes do harm.

use denoised_types::{
    CallId, Capture, Epoch, Failure, FailureCode, GenerateRequest, Image, Mask, Mode, PhaseTimes, Rank,
    RequestId, Resolved, TensorDType, WaveId, WorkerConfig,
};
use denoised_wire::*;

fn header() -> Header {
    Header {
        version: PROTOCOL_VERSION,
        epoch: Epoch(7),
        call_id: CallId(0x0102_0304_0506_0708),
        rank: Rank(3),
        deadline_ns: u64::MAX - 5,
    }
}

fn tensor() -> TensorMeta {
    TensorMeta {
        name: "latents.step_3".into(),
        dtype: TensorDType::F32,
        shape: vec![1, 16, 8, 8],
        blob: BlobIdx(1),
    }
}

fn commands() -> Vec<Command> {
    let member = Member {
        request_id: RequestId(9),
        request: GenerateRequest {
            negative_prompt: Some("blur".into()),
            guidance: Some(4.5),
            capture: Capture::Trace,
            images: vec![Image::picture(2, 1, Vec::new())],
            mask: Some(Mask {
                width: 2,
                height: 1,
                luma: Vec::new(),
            }),
            strength: Some(0.5),
            ..GenerateRequest::new("ein Bär \u{1f43b}")
        },
        blobs: vec![BlobIdx(0), BlobIdx(1)],
        deadline_ns: 0,
    };
    let wave = Wave {
        wave_id: WaveId(1),
        mode: Mode::Step,
        ranks: vec![Rank(0), Rank(3)],
        joining: vec![member.clone(), member],
        continuing: vec![RequestId(3), RequestId(7)],
        cancelled: vec![RequestId(5)],
        adapters: vec!["ink".into(), String::new()],
    };
    vec![
        Command::Execute(wave),
        Command::Call {
            method: "echo".into(),
            args: BlobIdx(0),
            ranks: vec![Rank(1), Rank(2)],
            replying: vec![Rank(2)],
        },
        Command::ControlCall {
            method: "progress".into(),
            args: vec![0, 255],
            is_replying: true,
        },
        Command::Cancel {
            requests: vec![RequestId(1), RequestId(u64::MAX)],
        },
        Command::Ping,
        Command::Stop,
    ]
}

fn events() -> Vec<Event> {
    let request_id = RequestId(4);
    let failure = Failure::new(FailureCode::OutOfMemory, "no room")
        .on_rank(Rank(2))
        .during("step 3 of 20");
    let resolved = Resolved {
        width: 64,
        height: 48,
        n_frames: 1,
        n_steps: 20,
        guidance: 7.0,
        seed: u64::MAX,
        sampler: "flow-euler".into(),
        warnings: vec![String::new(), "cut".into()],
    };
    let meta = GeneratedMeta {
        width: 64,
        height: 48,
        n_frames: 1,
        rgb: BlobIdx(0),
        resolved,
        times: PhaseTimes::default(),
    };
    vec![
        Event::RequestStarted { request_id },
        Event::Step {
            request_id,
            n_done: 3,
            n_steps: 20,
        },
        Event::Tensor {
            request_id,
            tensor: tensor(),
        },
        Event::RequestDone {
            request_id,
            outcome: Ok(meta),
        },
        Event::RequestDone {
            request_id,
            outcome: Err(failure.clone()),
        },
        Event::CallDone {
            outcome: Ok(Some(BlobIdx(0))),
        },
        Event::CallDone {
            outcome: Err(failure.clone()),
        },
        Event::Pong,
        Event::Dying(failure),
        Event::Piece { of: BlobIdx(3) },
    ]
}

fn boots() -> (Vec<BootDown>, Vec<BootUp>) {
    let config = WorkerConfig {
        model: "/m".into(),
        device: "cpu".into(),
        dtype: "f32".into(),
        n_threads: Some(2),
        warm_up: false,
    };
    let hello = Hello {
        epoch: Epoch(1),
        rank: Rank(2),
        world_size: 4,
        config,
        fds: vec![FdUse::CommandRing, FdUse::EventDoorbell],
        inline_limit_bytes: 65536,
        spin_ns: 0,
        event_send_limit_ms: 1,
    };
    let down = vec![
        BootDown::Hello(hello),
        BootDown::SharedWeights { has_weights: true },
    ];
    let up = vec![
        BootUp::Phase(StartPhase::PreparingWeights {
            done_bytes: 1,
            total_bytes: 2,
        }),
        BootUp::PublishShared { has_weights: false },
        BootUp::Ready {
            model: None,
            device: None,
            weight_bytes: 5,
            methods: vec![
                MethodInfo {
                    name: "echo".into(),
                    lane: Lane::Data,
                },
                MethodInfo {
                    name: "progress".into(),
                    lane: Lane::Control,
                },
            ],
        },
        BootUp::StartFailed(Failure::new(FailureCode::InvalidModel, "file missing")),
    ];
    (down, up)
}

fn encoded_commands() -> Vec<Vec<u8>> {
    let encode = |command| {
        let mut bytes = Vec::new();
        encode_command(&mut bytes, header(), &command);
        bytes
    };
    commands().into_iter().map(encode).collect()
}

fn encoded_events() -> Vec<Vec<u8>> {
    let encode = |event| {
        let mut bytes = Vec::new();
        encode_event(&mut bytes, header(), &event);
        bytes
    };
    events().into_iter().map(encode).collect()
}

/// Decodes as everything; only panics and endless memory would be wrong.
fn decode_as_all(bytes: &[u8]) -> usize {
    let mut n_ok = 0;
    if let Ok((header, body)) = split_header(bytes) {
        n_ok += usize::from(decode_command(&header, body).is_ok());
        n_ok += usize::from(decode_event(&header, body).is_ok());
    }
    n_ok + usize::from(decode_boot_down(bytes).is_ok()) + usize::from(decode_boot_up(bytes).is_ok())
}

/// SplitMix64 (Steele, Lea, Flood 2014): a seed replays every run.
struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

#[test]
fn every_message_survives_the_trip() {
    for (bytes, command) in encoded_commands().iter().zip(commands()) {
        let (seen, body) = split_header(bytes).unwrap();
        assert_eq!(seen, header());
        assert_eq!(decode_command(&seen, body).unwrap(), command);
    }
    for (bytes, event) in encoded_events().iter().zip(events()) {
        let (seen, body) = split_header(bytes).unwrap();
        assert_eq!(decode_event(&seen, body).unwrap(), event);
    }
    let (down, up) = boots();
    for message in down {
        assert_eq!(decode_boot_down(&encode_boot_down(&message)).unwrap(), message);
    }
    for message in up {
        assert_eq!(decode_boot_up(&encode_boot_up(&message)).unwrap(), message);
    }
}

#[test]
fn replies_of_the_control_lane_survive_the_trip() {
    let request_id = RequestId(8);
    let members = vec![MemberProgress {
        request_id,
        n_done: 2,
        n_steps: 20,
    }];
    let progress = RankProgress {
        rank: Rank(2),
        now_ns: u64::MAX,
        doing: Doing::Wave {
            wave_id: WaveId(3),
            mode: Mode::Step,
            members: members.clone(),
            work: Some(Work::Step {
                members: vec![(request_id, 2)],
            }),
        },
        since_ns: 4,
        moved_ns: 5,
        last_call_id: CallId(6),
        n_waiting: 7,
        residents: members,
    };
    assert_eq!(RankProgress::from_bytes(&progress.to_bytes()).unwrap(), progress);
    let span = |work| Span {
        work,
        begin_ns: 1,
        duration_ns: u64::MAX,
    };
    let profile = Profile {
        rank: Rank(1),
        begin_ns: 0,
        end_ns: 9,
        spans: vec![
            span(Work::Wait),
            span(Work::Encode { request_id }),
            span(Work::Decode { request_id }),
            span(Work::Wave {
                wave_id: WaveId(3),
                mode: Mode::Request,
            }),
            span(Work::Method { name: "own".into() }),
        ],
        n_dropped: 3,
    };
    let bytes = profile.to_bytes();
    assert_eq!(Profile::from_bytes(&bytes).unwrap(), profile);
    for len in 0..bytes.len() {
        assert!(Profile::from_bytes(&bytes[..len]).is_err());
    }
    for (bytes, bit) in [(profile.to_bytes(), 3), (progress.to_bytes(), 5)] {
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            // Only a panic would be wrong.
            let _ = (
                Profile::from_bytes(&damaged).is_ok(),
                RankProgress::from_bytes(&damaged).is_ok(),
            );
        }
    }
}

#[test]
fn the_header_is_little_endian_in_field_order() {
    let bytes = header().to_bytes();
    // By hand: version 5, epoch 7, call 0x0102030405060708, rank 3, deadline 2^64 - 6.
    let expected = [
        5, 0, 7, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 3, 0, 0xfa, 255, 255, 255, 255, 255, 255, 255,
    ];
    assert_eq!(bytes, expected);
    assert_eq!(Header::from_bytes(&bytes), header());
}

#[test]
fn another_version_is_refused_with_both_numbers_and_can_still_be_answered() {
    let other = Header {
        version: PROTOCOL_VERSION + 1,
        ..header()
    };
    let mut bytes = Vec::new();
    encode_command(&mut bytes, other, &Command::Ping);
    let (seen, body) = split_header(&bytes).unwrap();
    assert_eq!(seen.call_id, header().call_id);
    let error = decode_command(&seen, body).unwrap_err();
    assert_eq!(
        error,
        DecodeError::WrongVersion {
            theirs: PROTOCOL_VERSION + 1,
            ours: PROTOCOL_VERSION
        }
    );
    assert_eq!(decode_event(&seen, body).unwrap_err(), error);
    let mut boot = encode_boot_up(&BootUp::PublishShared { has_weights: true });
    boot[0] = 99;
    assert_eq!(
        decode_boot_up(&boot).unwrap_err(),
        DecodeError::WrongVersion {
            theirs: 99,
            ours: PROTOCOL_VERSION
        }
    );
}

#[test]
fn unknown_kinds_left_over_bytes_and_wrong_sizes_are_typed() {
    assert!(matches!(
        decode_command(&header(), &[77]),
        Err(DecodeError::Corrupt { what: "command", .. })
    ));
    assert!(matches!(
        decode_event(&header(), &[77]),
        Err(DecodeError::Corrupt { what: "event", .. })
    ));
    // 5 is `Stop`, which has no fields.
    assert_eq!(decode_command(&header(), &[5]), Ok(Command::Stop));
    assert!(matches!(
        decode_command(&header(), &[5, 0]),
        Err(DecodeError::Trailing { extra_bytes: 1, .. })
    ));
    assert!(matches!(
        split_header(&[0; 23]),
        Err(DecodeError::TooShort {
            message_bytes: 23,
            ..
        })
    ));
    let long = vec![0; MAX_MESSAGE_BYTES + 1];
    assert!(matches!(split_header(&long), Err(DecodeError::TooLong { .. })));
    assert!(matches!(
        decode_command(&header(), &long),
        Err(DecodeError::TooLong { .. })
    ));
}

#[test]
fn truncated_messages_are_errors() {
    for bytes in encoded_commands() {
        for len in HEADER_BYTES..bytes.len() {
            let (header, body) = split_header(&bytes[..len]).unwrap();
            assert!(
                decode_command(&header, body).is_err(),
                "{len} of {} bytes",
                bytes.len()
            );
        }
    }
    for bytes in encoded_events() {
        for len in HEADER_BYTES..bytes.len() {
            let (header, body) = split_header(&bytes[..len]).unwrap();
            assert!(
                decode_event(&header, body).is_err(),
                "{len} of {} bytes",
                bytes.len()
            );
        }
    }
}

#[test]
fn flipped_bits_never_panic() {
    let (down, up) = boots();
    let boots = down
        .iter()
        .map(encode_boot_down)
        .chain(up.iter().map(encode_boot_up));
    for bytes in encoded_commands()
        .into_iter()
        .chain(encoded_events())
        .chain(boots)
    {
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            decode_as_all(&damaged);
        }
    }
}

#[test]
fn random_bytes_never_panic() {
    let mut random = Seeded(20_240_607);
    let sources: Vec<Vec<u8>> = encoded_commands().into_iter().chain(encoded_events()).collect();
    for round in 0..20_000 {
        let mut bytes = if round % 2 == 0 {
            let n_bytes = random.below(200);
            (0..n_bytes).map(|_| random.next() as u8).collect()
        } else {
            // A real message with a random stretch overwritten and a random tail.
            let mut bytes = sources[random.below(sources.len())].clone();
            let (start, n_bytes) = (random.below(bytes.len()), random.below(16));
            for byte in bytes.iter_mut().skip(start).take(n_bytes) {
                *byte = random.next() as u8;
            }
            bytes.truncate(random.below(bytes.len() + 1));
            bytes
        };
        if bytes.len() >= 2 && random.below(4) > 0 {
            bytes[..2].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        }
        decode_as_all(&bytes);
    }
}

#[test]
fn lists_that_lie_about_their_length_are_refused() {
    // `ControlCall` (2), `Cancel` (3), `Execute` (0) or `Call` (1) whose list or text claims 2^63 entries, as a varint.
    let huge = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    for prefix in [vec![2], vec![3], vec![0, 1, 0, 1, 0], vec![1]] {
        let body: Vec<u8> = prefix.iter().chain(&huge).copied().collect();
        assert!(matches!(
            decode_command(&header(), &body),
            Err(DecodeError::Corrupt { .. })
        ));
    }
}
