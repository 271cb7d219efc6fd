//! Pictures in, videos out: what `denoised generate` does beside drawing from a text.

use crate::support::{case, decode, run};
use image::{AnimationDecoder, RgbImage, codecs::webp::WebPDecoder};
use std::fs;
use std::io::Cursor;
use std::path::Path;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn model(name: &str) -> String {
    case(name).join("model").display().to_string()
}

/// Writes a picture of a gradient, and masks of nothing and of the right half.
fn write_inputs(folder: &Path) {
    let save = |name: &str, rgb: &dyn Fn(u32, u32) -> [u8; 3]| {
        let picture = RgbImage::from_fn(64, 64, |x, y| image::Rgb(rgb(x, y)));
        picture.save(folder.join(name)).expect("it can be written");
    };
    save("in.png", &|x, y| [(4 * x) as u8, (4 * y) as u8, 128]);
    save("nothing.png", &|_, _| [0; 3]);
    save("right.png", &|x, _| if x < 32 { [0; 3] } else { [255; 3] });
}

#[test]
fn a_mask_of_nothing_keeps_the_picture_whatever_is_asked_for() {
    let folder = folder();
    let folder = folder.path();
    write_inputs(folder);
    let draw = |prompt: &str, mask: &str, output: &str| {
        let args = [
            "generate",
            prompt,
            "--model",
            &model("sd15"),
            "--image",
            "in.png",
            "--mask",
            mask,
            "--steps",
            "3",
            "--seed",
            "7",
            "-o",
            output,
        ];
        run(folder, &args).expect_code(0);
        decode(&fs::read(folder.join(output)).expect("it was written")).rgb
    };
    let kept = draw("a cat", "nothing.png", "a.png");
    assert_eq!(draw("a dog", "nothing.png", "b.png"), kept);
    let changed = draw("a dog", "right.png", "c.png");
    assert_ne!(changed, kept);
    assert_ne!(draw("a cat", "right.png", "d.png"), changed);
}

#[test]
fn strength_says_how_much_of_a_picture_is_given_up() {
    let folder = folder();
    let folder = folder.path();
    write_inputs(folder);
    let draw = |strength: &str, seed: &str| {
        let args = [
            "generate",
            "a cat",
            "--model",
            &model("sd15"),
            "--image",
            "in.png",
            "--strength",
            strength,
            "--steps",
            "6",
            "--seed",
            seed,
            "-o",
            "out.png",
            "--json",
        ];
        let lines = run(folder, &args).expect_code(0).json_lines();
        assert_eq!(
            (&lines[0]["width"], &lines[0]["height"]),
            (&64.into(), &64.into())
        );
        decode(&fs::read(folder.join("out.png")).expect("it was written")).rgb
    };
    let distance = |a: &[u8], b: &[u8]| -> u64 {
        let squares = a.iter().zip(b).map(|(a, b)| u64::from(a.abs_diff(*b)).pow(2));
        squares.sum()
    };
    // Two seeds part the further the more of the picture is given up.
    let apart = |strength: &str| distance(&draw(strength, "1"), &draw(strength, "2"));
    let (little, all) = (apart("0.2"), apart("1.0"));
    assert!(little < all, "{little} at strength 0.2, {all} at 1");
}

#[test]
fn a_video_is_an_animated_webp() {
    let folder = folder();
    let folder = folder.path();
    let wan = model("wan21-t2v");
    let args = [
        "generate", "a fox", "--model", &wan, "--frames", "5", "--size", "48x64", "--steps", "2", "--seed",
        "3", "--fps", "8",
    ];
    let text = run(folder, &args).expect_code(0).text();
    assert!(
        text.starts_with("out.webp: seed 3, 48x64, 5 frames, 2 steps"),
        "{text}"
    );
    let file = fs::read(folder.join("out.webp")).expect("it was written");
    let decoder = WebPDecoder::new(Cursor::new(&file)).expect("a WebP file");
    let frames = decoder.into_frames().collect_frames().expect("frames");
    assert_eq!(frames.len(), 5);
    for frame in &frames {
        assert_eq!(frame.buffer().dimensions(), (48, 64));
        assert_eq!(frame.delay().numer_denom_ms(), (125, 1));
    }
    assert!(frames[0].buffer() != frames[4].buffer(), "nothing moves");
}

#[test]
fn what_a_model_cannot_do_is_refused_with_what_it_can() {
    let folder = folder();
    let folder = folder.path();
    write_inputs(folder);
    fs::write(folder.join("notes.txt"), "no picture").expect("it can be written");
    let (sd15, dit, wan) = (model("sd15"), model("dit"), model("wan21-t2v"));
    let cases: [(&[&str], &str); 12] = [
        (&["--model", &sd15, "--mask", "right.png"], "--image"),
        (
            &["--model", &sd15, "--image", "in.png", "--strength", "1.5"],
            "above 0 and at most 1",
        ),
        (&["--model", &sd15, "--image", "absent.png"], "absent.png"),
        (&["--model", &sd15, "--image", "notes.txt"], "notes.txt"),
        (
            &["--model", &sd15, "--image", "in.png", "--image", "in.png"],
            "2 pictures",
        ),
        (&["--model", &sd15, "--frames", "5"], "this model makes pictures"),
        (&["--model", &sd15, "-o", "out.webp"], ".png"),
        (&["--model", &sd15, "--guidance-2", "3"], "one denoiser"),
        (&["--model", &dit, "--image", "in.png"], "takes none"),
        (&["--model", &dit], "by number"),
        (&["--model", &wan, "--frames", "6", "--size", "48x64"], "5 or 9"),
        (&["--model", &wan, "--frames", "5", "-o", "out.png"], ".webp"),
    ];
    for (args, word) in cases {
        let args = [&["generate", "a cat", "--steps", "2"], args].concat();
        let outcome = run(folder, &args).expect_code(2);
        let said = &outcome.stderr;
        assert!(said.contains(word), "no `{word}` in {said}");
    }
    let left = fs::read_dir(folder).expect("readable").count();
    assert_eq!(left, 4, "only the inputs are there");
}
