//! Weight files that are cut, flipped, contradictory or something else altogether.

use crate::support::{Random, file_of, file_with, put, refusal, temp, text};
use denoised_checkpoint::{CheckpointError, FormatError, SafeTensors};
use denoised_tensor::WeightSource;
use std::{fs, os::unix::fs::symlink, path::Path};

/// Opens `bytes` as a file.
fn open(bytes: &[u8]) -> Result<SafeTensors, CheckpointError> {
    let folder = temp();
    let path = folder.path().join("a.safetensors");
    put(&path, bytes);
    SafeTensors::open(&path)
}

fn format_error(bytes: &[u8]) -> FormatError {
    match open(bytes) {
        Err(CheckpointError::Format { source, .. }) => source,
        Err(other) => panic!("{}", text(&other)),
        Ok(_) => panic!("{:?} was accepted", String::from_utf8_lossy(bytes)),
    }
}

/// The message for a file with this header and `n_bytes` of elements.
fn header_refusal(header: &str, n_bytes: usize) -> String {
    let error = open(&file_of(header, &vec![0; n_bytes])).expect_err("this header must be refused");
    text(&error)
}

#[test]
fn a_file_cut_anywhere_says_how_many_bytes_are_missing() {
    let whole = file_with(&["a", "b"]);
    let data_start = whole.len() - 16;
    for size in 0..whole.len() {
        let missing = match format_error(&whole[..size]) {
            FormatError::NoLength { size_bytes } if size < 8 => {
                assert_eq!(size_bytes, size as u64);
                continue;
            }
            FormatError::HeaderTruncated { missing_bytes, .. } if (8..data_start).contains(&size) => {
                assert_eq!(missing_bytes, (data_start - size) as u64);
                continue;
            }
            FormatError::Truncated {
                missing_bytes,
                expected_bytes,
            } => {
                assert_eq!(expected_bytes, whole.len() as u64);
                missing_bytes
            }
            other => panic!("cut to {size} bytes: {other}"),
        };
        assert_eq!(missing, (whole.len() - size) as u64, "cut to {size} bytes");
    }
    let cut = text(&open(&whole[..whole.len() - 3]).unwrap_err());
    assert!(
        cut.ends_with(&format!("3 of {} bytes are missing at its end", whole.len())),
        "{cut}"
    );
    assert!(
        cut.contains("a.safetensors is not a sound safetensors file"),
        "{cut}"
    );
}

#[test]
fn no_flipped_bit_causes_a_panic_or_bytes_out_of_bounds() {
    let folder = temp();
    let path = folder.path().join("a.safetensors");
    let whole = file_with(&["first.weight", "second.bias"]);
    let header_end = whole.len() - 16;
    let mut n_accepted = 0;
    for bit in 0..header_end * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        put(&path, &bytes);
        let Ok(file) = SafeTensors::open(&path) else {
            continue;
        };
        n_accepted += 1;
        for (name, info) in file.tensors() {
            let Ok(raw) = file.raw(name) else { continue };
            let n_elements: usize = info.shape.iter().product();
            assert_eq!(raw.bytes.len(), n_elements * 4, "bit {bit}");
        }
    }
    // A flip inside a name gives another name, which no header check can know.
    assert!(
        n_accepted > 0 && n_accepted < header_end * 8 / 2,
        "{n_accepted} of {} accepted",
        header_end * 8
    );
}

/// A tensor as a reader sees it: name, dtype, shape, elements.
type Seen = (String, String, Vec<usize>, Vec<u8>);

/// What the format's own reader sees in `bytes`, if it takes them.
fn oracle(bytes: &[u8]) -> Option<Vec<Seen>> {
    let parsed = safetensors::SafeTensors::deserialize(bytes).ok()?;
    let mut tensors: Vec<Seen> = parsed
        .iter()
        .map(|(name, view)| {
            (
                name.to_owned(),
                format!("{:?}", view.dtype()),
                view.shape().to_vec(),
                view.data().to_vec(),
            )
        })
        .collect();
    tensors.sort();
    Some(tensors)
}

#[test]
fn whatever_is_accepted_reads_as_the_formats_own_reader_reads_it() {
    let folder = temp();
    let path = folder.path().join("a.safetensors");
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F16","shape":[3,2],"data_offsets":[16,28]},"#,
        r#""a":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},"#,
        r#""empty":{"dtype":"F32","shape":[0,7],"data_offsets":[28,28]},"#,
        r#""scalar":{"dtype":"BF16","shape":[],"data_offsets":[28,30]}}  "#
    );
    let whole = file_of(header, &(0..30).collect::<Vec<u8>>());
    assert_eq!(oracle(&whole).unwrap().len(), 4);
    let mut random = Random(2);
    let (mut n_accepted, mut n_stricter) = (0, 0);
    for round in 0..6_000 {
        let bytes = if round == 0 {
            whole.clone()
        } else {
            random.damage(&whole)
        };
        put(&path, &bytes);
        let ours = SafeTensors::open(&path);
        let shown = String::from_utf8_lossy(&bytes);
        match (ours, oracle(&bytes)) {
            (Ok(file), Some(expected)) => {
                n_accepted += 1;
                let seen: Vec<Seen> = file
                    .tensors()
                    .keys()
                    .map(|name| file.raw(name).map(|raw| (name.clone(), raw)).unwrap())
                    .map(|(name, raw)| (name, raw.dtype.to_string(), raw.shape, raw.bytes.to_vec()))
                    .collect();
                assert_eq!(seen, expected, "round {round}: {shown}");
            }
            (Ok(file), None) => {
                // A dtype that nobody knows spoils its own tensor here and the whole file there.
                let mut dtypes = file.tensors().values().map(|info| &info.dtype);
                assert!(
                    dtypes.any(|dtype| dtype.bits().is_none()),
                    "round {round}: {shown}"
                );
            }
            (Err(error), Some(_)) => {
                n_stricter += 1;
                let error = text(&error);
                let reasons = [
                    "stands there twice",
                    "unknown field",
                    "duplicate field",
                    "does not take",
                ];
                assert!(
                    reasons.iter().any(|reason| error.contains(reason)),
                    "round {round}: {error}: {shown}"
                );
            }
            (Err(_), None) => {}
        }
    }
    assert!(
        n_accepted > 100,
        "{n_accepted} accepted, {n_stricter} refused by us alone"
    );
}

#[test]
fn contradictory_offsets_are_refused_with_tensor_and_number() {
    let two = |a: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{a}}},"b":{{"dtype":"F32","shape":[2],"data_offsets":{b}}}}}"#
        )
    };
    let one = |offsets: &str| format!(r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}"#);
    let cases = [
        (
            two("[0,8]", "[4,12]"),
            12,
            "tensor `b` overlaps the one before it by 4 bytes",
        ),
        (
            two("[0,8]", "[0,8]"),
            8,
            "tensor `b` overlaps the one before it by 8 bytes",
        ),
        (
            two("[0,8]", "[12,20]"),
            20,
            "4 bytes before tensor `b` belong to no tensor",
        ),
        (one("[4,12]"), 12, "4 bytes before tensor `a` belong to no tensor"),
        (one("[8,0]"), 8, "tensor `a` has impossible offsets 8..0"),
        (
            one("[0,7]"),
            7,
            "tensor `a` of shape [2] and dtype F32 does not take the 7 bytes of its offsets",
        ),
        (one("[0,16]"), 16, "does not take the 16 bytes"),
        (
            one("[18446744073709551608,18446744073709551615]"),
            8,
            "impossible offsets",
        ),
        (one("[0,18446744073709551615]"), 8, "impossible offsets"),
        (
            one("[9223372036854775799,9223372036854775807]"),
            8,
            "9223372036854775799 bytes before tensor `a`",
        ),
        (one("[0,8]"), 9, "1 bytes follow its last tensor"),
        (one("[-8,0]"), 8, "`a`: invalid value: integer `-8`, expected u64"),
        (one("[0.0,8.0]"), 8, "`a`: invalid type: floating point"),
        (one("[0,8,9]"), 8, "`a`: "),
        (one("[0]"), 8, "`a`: "),
        (one("null"), 8, "`a`: "),
        ("{}".to_owned(), 1, "1 bytes follow its last tensor"),
    ];
    for (header, n_bytes, expected) in cases {
        let message = header_refusal(&header, n_bytes);
        assert!(message.contains(expected), "{header}: {message}");
    }
    assert!(open(&file_of("{}", b"")).unwrap().tensors().is_empty());
}

#[test]
fn shapes_whose_product_overflows_are_refused() {
    let with_shape =
        |shape: &str| format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}"#);
    for shape in [
        "[9223372036854775808]",
        "[9223372036854775808,2]",
        "[4294967296,4294967296]",
        "[4611686018427387904]",
        "[0,9223372036854775808]",
        "[0,9223372036854775808,2]",
        "[18446744073709551615,18446744073709551615,0]",
    ] {
        let message = header_refusal(&with_shape(shape), 0);
        assert!(
            message.contains("does not take the 0 bytes"),
            "{shape}: {message}"
        );
    }
    assert!(header_refusal(&with_shape("[18446744073709551616]"), 0).contains("`a`: "));
    assert!(header_refusal(&with_shape(&format!("[{}1]", "1,".repeat(16))), 4).contains("has 17 dimensions"));
    let empty = open(&file_of(&with_shape("[3,0]"), b"")).unwrap();
    assert_eq!(empty.weight("a").unwrap().bytes.len(), 0);
}

#[test]
fn headers_that_are_no_object_of_tensors_are_refused() {
    let good = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let cases = [
        (format!(r#"{{"a":{good},"a":{good}}}"#), "`a` stands there twice"),
        (
            r#"{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#.into(),
            "duplicate field",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[2]}}"#.into(),
            "`a`: missing field `data_offsets`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"scale":2}}"#.into(),
            "unknown field `scale`",
        ),
        (
            r#"{"a":{"dtype":32,"shape":[2],"data_offsets":[0,8]}}"#.into(),
            "`a`: invalid type",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}}"#.into(),
            "`a`: invalid type",
        ),
        (
            format!(r#"{{"__metadata__":{{"n":1}},"a":{good}}}"#),
            "`__metadata__`: invalid type",
        ),
        (
            format!(r#"{{"__metadata__":{good},"a":{good}}}"#),
            "`__metadata__`: ",
        ),
        (
            format!(r#"{{"__metadata__":{{}},"__metadata__":{{}},"a":{good}}}"#),
            "`__metadata__` stands there twice",
        ),
        (format!(r#"[{good}]"#), "expected an object of tensors"),
        ("null".into(), "expected an object of tensors"),
        (format!(r#"{{"a":{good}}} x"#), "trailing characters"),
        (format!(r#"{{"a":{good}"#), "EOF while parsing"),
        (format!("\u{feff}{{\"a\":{good}}}"), "expected value"),
        ("[".repeat(100_000), "expected an object of tensors"),
        (format!(r#"{{"a":{}"#, "[".repeat(100_000)), "`a`: "),
        (
            format!(r#"{{"a":{{"dtype":"F32","shape":{}"#, "[".repeat(100_000)),
            "`a`: ",
        ),
    ];
    for (header, expected) in cases {
        let message = header_refusal(&header, 8);
        let start: String = header.chars().take(100).collect();
        assert!(message.contains(expected), "{start}: {message}");
        assert!(
            message.contains("a.safetensors is not a sound safetensors file: its header is not valid"),
            "{message}"
        );
        assert!(
            message.len() < 1_000,
            "{start}: a message of {} bytes",
            message.len()
        );
    }
    let mut not_utf8 = file_with(&["name"]);
    not_utf8[10] = 0xff;
    assert!(text(&open(&not_utf8).unwrap_err()).contains("its header is not valid"));
}

#[test]
fn header_lengths_beyond_reason_are_refused_before_anything_is_read() {
    for header_bytes in [0, (32 << 20) + 1, 1 << 40, u64::MAX - 7, u64::MAX] {
        let mut bytes = file_with(&["a"]);
        bytes[..8].copy_from_slice(&header_bytes.to_le_bytes());
        match format_error(&bytes) {
            FormatError::HeaderLength { header_bytes: seen } => assert_eq!(seen, header_bytes),
            other => panic!("{header_bytes}: {other}"),
        }
    }
    let mut bytes = file_with(&["a"]);
    let missing = (32 << 20) + 8 - bytes.len() as u64;
    bytes[..8].copy_from_slice(&(32u64 << 20).to_le_bytes());
    assert!(
        matches!(format_error(&bytes), FormatError::HeaderTruncated { missing_bytes, .. } if missing_bytes == missing)
    );
}

#[test]
fn names_from_a_file_cannot_write_to_the_terminal_or_flood_the_log() {
    let name = format!("\\u001b[31m{}", "x".repeat(50_000));
    let message = header_refusal(
        &format!(r#"{{"{name}":{{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}}}"#),
        4,
    );
    assert!(
        message.contains("\\u{1b}[31mxxx") && !message.contains('\u{1b}'),
        "{message}"
    );
    assert!(message.len() < 1_000);
}

#[test]
fn other_things_under_the_name_of_a_weight_file_are_named_for_what_they_are() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    assert!(text(&open(pointer).unwrap_err()).contains("is a git-lfs pointer"));
    // The first bytes of files that torch.save wrote: a zip archive, and a bare pickle by its legacy form.
    for start in [
        &b"PK\x03\x04\x00\x00\x08\x08\x00\x00"[..],
        b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
    ] {
        let message = text(&open(start).unwrap_err());
        assert!(
            message.contains("is a pickle checkpoint") && message.contains("safe_serialization=True"),
            "{message}"
        );
    }
    let folder = temp();
    assert!(refusal(SafeTensors::open(folder.path())).contains("not a regular file"));
    assert!(refusal(SafeTensors::open(&folder.path().join("absent"))).contains("absent does not exist"));
    let device = folder.path().join("a.safetensors");
    symlink("/dev/zero", &device).unwrap();
    assert!(refusal(SafeTensors::open(&device)).contains("not a regular file"));
    assert!(matches!(
        SafeTensors::open(Path::new("nul\0.safetensors")),
        Err(CheckpointError::Io { .. })
    ));
}

#[test]
fn a_dtype_that_is_no_float_hurts_only_who_asks_for_it() {
    let header = concat!(
        r#"{"ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"#,
        r#""new":{"dtype":"Q\u001b9","shape":[5],"data_offsets":[8,11]},"#,
        r#""packed":{"dtype":"F4","shape":[2,3],"data_offsets":[11,14]},"#,
        r#""w":{"dtype":"F32","shape":[1],"data_offsets":[14,18]}}"#
    );
    let mut data = vec![7, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6];
    data.extend(2.5f32.to_le_bytes());
    let file = open(&file_of(header, &data)).unwrap();
    assert_eq!(file.tensor("w").unwrap().bytes[..], 2.5f32.to_le_bytes());
    assert_eq!(file.raw("ids").unwrap().bytes, 7i64.to_le_bytes());
    assert_eq!(file.raw("packed").unwrap().bytes, [4, 5, 6]);
    for (name, dtype) in [("ids", "I64"), ("packed", "F4"), ("new", "Q\\u{1b}9")] {
        let message = refusal(file.weight(name));
        assert!(
            message.contains(&format!("tensor `{name}` has dtype {dtype};")),
            "{message}"
        );
        assert_eq!(file.tensor(name).unwrap_err().0, message);
    }
    assert!(refusal(file.raw("new")).contains("has dtype Q"));
    assert!(refusal(file.weight("absent")).contains("has no tensor `absent`"));
    // Three elements of 4 bits are no whole bytes.
    let odd = r#"{"p":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#;
    assert!(header_refusal(odd, 1).contains("does not take the 1 bytes"));
}

#[test]
fn a_file_shortened_after_it_was_opened_is_an_error_and_no_signal() {
    let folder = temp();
    let path = folder.path().join("a.safetensors");
    let header = concat!(
        r#"{"a":{"dtype":"F32","shape":[4096],"data_offsets":[0,16384]},"#,
        r#""b":{"dtype":"F32","shape":[4096],"data_offsets":[16384,32768]}}"#
    );
    put(&path, file_of(header, &[0; 32_768]));
    let file = SafeTensors::open(&path).unwrap();
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(16_384 + 8 + header.len() as u64)
        .unwrap();
    assert_eq!(file.weight("a").unwrap().bytes.len(), 16_384);
    let message = refusal(file.weight("b"));
    assert!(
        message.contains("the bytes of tensor `b` cannot be read (was the file changed"),
        "{message}"
    );
}

#[test]
fn a_checkpoint_read_from_end_to_end_does_not_stay_in_memory() {
    let folder = temp();
    let path = folder.path().join("large.safetensors");
    let (n_tensors, tensor_bytes) = (20, 8 << 20);
    let entries: Vec<String> = (0..n_tensors)
        .map(|idx| {
            let (begin, end) = (idx * tensor_bytes, (idx + 1) * tensor_bytes);
            format!(
                r#""t{idx}":{{"dtype":"F32","shape":[{}],"data_offsets":[{begin},{end}]}}"#,
                tensor_bytes / 4
            )
        })
        .collect();
    put(&path, file_of(&format!("{{{}}}", entries.join(",")), b""));
    let header_bytes = path.metadata().unwrap().len();
    let total_bytes = (n_tensors * tensor_bytes) as u64;
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(header_bytes + total_bytes)
        .unwrap();

    let resident_bytes = || {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let ours = maps
            .split_once(path.to_str().unwrap())
            .expect("the file is mapped")
            .1;
        let line = ours
            .lines()
            .find_map(|line| line.strip_prefix("Rss:"))
            .expect("every mapping has an Rss");
        line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() << 10
    };
    let file = SafeTensors::open(&path).unwrap();
    let mut peak_bytes = 0;
    let mut held = Vec::new();
    for idx in 0..n_tensors {
        let tensor = file.weight(&format!("t{idx}")).unwrap();
        assert!(tensor.bytes.iter().all(|&byte| byte == 0));
        held.push(tensor);
        peak_bytes = peak_bytes.max(resident_bytes());
    }
    // 64 MiB, the tensor that went over it and the latest one; 2 MiB for whole pages at the ends.
    assert!(
        peak_bytes >= tensor_bytes as u64 && peak_bytes <= 82 << 20,
        "{peak_bytes} bytes of {total_bytes}"
    );
    assert!(
        held.iter().all(|tensor| tensor.bytes[0] == 0),
        "evicted bytes are still there when touched"
    );
}
