//! Token by token against decoding everything each time.

use std::sync::atomic::{AtomicUsize, Ordering};

use aligner_core::rng::Rng;

use super::*;

/// Tokens are bytes; what is no UTF-8 comes as U+FFFD, as in byte-level BPE. Counts the tokens of the
/// longest call.
struct Bytes {
    tokens: Vec<Vec<u8>>,
    longest: AtomicUsize,
}

impl Detokenize for Bytes {
    fn text(&self, tokens: &[u32]) -> String {
        self.longest.fetch_max(tokens.len(), Ordering::Relaxed);
        let bytes: Vec<u8> = tokens.iter().flat_map(|&token| self.tokens[token as usize].clone()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// As in `SentencePiece`: the text loses its first space, and runs of byte tokens are characters if they
/// are UTF-8, else one U+FFFD each.
struct Pieces(Vec<Piece>);

enum Piece {
    Text(&'static str),
    Byte(u8),
}

impl Detokenize for Pieces {
    fn text(&self, tokens: &[u32]) -> String {
        let (mut text, mut run) = (String::new(), Vec::new());
        let flush = |run: &mut Vec<u8>, text: &mut String| {
            match std::str::from_utf8(run) {
                Ok(whole) => text.push_str(whole),
                Err(_) => text.extend(run.iter().map(|_| '\u{FFFD}')),
            }
            run.clear();
        };
        for &token in tokens {
            match self.0[token as usize] {
                Piece::Byte(byte) => run.push(byte),
                Piece::Text(piece) => {
                    flush(&mut run, &mut text);
                    text.push_str(piece);
                }
            }
        }
        flush(&mut run, &mut text);
        text.strip_prefix(' ').map(str::to_owned).unwrap_or(text)
    }
}

fn sampling(stops: &[String], min_tokens: usize) -> Sampling {
    Sampling { stop_strings: stops.to_vec(), min_tokens, ..Sampling::default() }
}

fn sure(text: &str) -> &str {
    text.trim_end_matches('\u{FFFD}')
}

/// Where the first stop string begins that ends beyond `before` bytes.
fn first_stop(text: &str, stops: &[String], before: usize) -> Option<usize> {
    let begins = |&at: &usize| {
        text.is_char_boundary(at)
            && stops.iter().any(|stop| text[at..].starts_with(stop.as_str()) && at + stop.len() > before)
    };
    (0..text.len()).find(begins)
}

/// The text without its longest end that is the beginning of a stop string.
fn safe<'a>(text: &'a str, stops: &[String]) -> &'a str {
    let begins = |&at: &usize| {
        let end = text.get(at..).unwrap_or_default();
        !end.is_empty() && stops.iter().any(|stop| stop.starts_with(end) && stop.len() > end.len())
    };
    &text[..(0..text.len()).find(begins).unwrap_or(text.len())]
}

/// Pushes `tokens` and compares with the text of all of them after each.
fn check(detokenizer: &Arc<dyn Detokenize>, tokens: &[u32], stops: &[String], min_tokens: usize) {
    let settings = sampling(stops, min_tokens);
    let mut matcher = StopText::new(detokenizer.clone(), &settings);
    let mut stream = TextStream::new(detokenizer.clone(), &settings);
    let (mut shown, mut before) = (String::new(), 0);
    for count in 1..=tokens.len() {
        let context = || format!("{tokens:?} at {count}, stops {stops:?}, min {min_tokens}");
        let text = detokenizer.text(&tokens[..count]);
        let sure = sure(&text);
        let stop = first_stop(sure, stops, before).filter(|_| count >= min_tokens);
        shown += &stream.push(tokens[count - 1]);
        assert_eq!(matcher.push(tokens[count - 1]), stop.is_some(), "{}", context());
        assert_eq!(stream.stopped(), stop.is_some(), "{}", context());
        if let Some(at) = stop {
            assert_eq!(shown, text[..at], "{}", context());
            assert_eq!(stream.push(tokens[0]) + &stream.finish(), "");
            assert!(matcher.push(tokens[0]), "a stop stays");
            return;
        }
        // A long run of U+FFFD is given out in parts.
        let ahead =
            shown.starts_with(safe(sure, stops)) && text.starts_with(&shown) && sure.len() < text.len();
        assert!(ahead || shown == safe(sure, stops), "{}: {shown:?} of {text:?}", context());
        before = sure.len();
    }
    assert_eq!(shown + &stream.finish(), detokenizer.text(tokens));
}

fn word(rng: Rng, from: u64, len: u64) -> String {
    let letters = ["a", "b", "é", "€", "😀", "\n"];
    (from..from + len).map(|i| letters[rng.below(i, 6) as usize]).collect()
}

/// The text's own parts and random words.
fn random_stops(rng: Rng, text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let part = |n: u64| {
        let start = rng.below(n, chars.len() as u64) as usize;
        let len = 1 + rng.below(n + 1, 6) as usize;
        chars[start..(start + len).min(chars.len())].iter().collect::<String>()
    };
    match rng.below(500, 4) {
        0 => Vec::new(),
        1 => vec![word(rng, 501, 3)],
        2 => vec![word(rng, 501, 5), word(rng, 510, 7), word(rng, 520, 2)],
        _ => vec![part(530), word(rng, 540, 4)],
    }
}

#[test]
fn texts_cut_anywhere_match_decoding_everything() {
    for case in 0..3000 {
        let rng = Rng::new(&[31, case]);
        let text = word(rng, 0, 1 + rng.below(400, 40));
        let bytes = text.as_bytes();
        let (mut tokens, mut at) = (Vec::new(), 0);
        while at < bytes.len() {
            // A token without a text now and then.
            let len =
                rng.below(600 + tokens.len() as u64, 1 + [2, 4, 9][rng.below(401, 3) as usize]) as usize;
            let end = (at + len).min(bytes.len());
            tokens.push(bytes[at..end].to_vec());
            at = end;
        }
        let ids: Vec<u32> = (0..tokens.len() as u32).collect();
        let detokenizer: Arc<dyn Detokenize> = Arc::new(Bytes { tokens, longest: AtomicUsize::new(0) });
        let min_tokens = [0, 0, 3, 10][rng.below(402, 4) as usize];
        check(&detokenizer, &ids, &random_stops(rng, &text), min_tokens);
    }
}

#[test]
fn bytes_that_are_no_text_match_decoding_everything_in_bounded_work() {
    let alphabet: [&[u8]; 12] = [
        b"a",
        b"b",
        b"\xE2",
        b"\x82",
        b"\xAC",
        b"\xF0\x9F",
        b"\x98",
        b"\x80",
        b"\xC3",
        b"\xA9b",
        b"a\xE2",
        b"\xFF",
    ];
    for case in 0..600 {
        let rng = Rng::new(&[32, case]);
        // Some cases hold hardly anything but bytes of broken characters.
        let first = [0, 2, 3][rng.below(2000, 3) as usize];
        let ids: Vec<u32> = (0..150).map(|i| (first + rng.below(i, 12 - first)) as u32).collect();
        let tokens = alphabet.iter().map(|token| token.to_vec()).collect();
        let detokenizer = Arc::new(Bytes { tokens, longest: AtomicUsize::new(0) });
        let stops = [vec![], vec!["€a".to_owned()], vec!["bb".to_owned(), "ab€".to_owned()]];
        let mut stream = TextStream::new(detokenizer.clone(), &Sampling::default());
        for &token in &ids {
            stream.push(token);
        }
        let longest = detokenizer.longest.load(Ordering::Relaxed);
        assert!(longest <= 2 * 64 + 4, "{longest} tokens decoded at once");
        let detokenizer: Arc<dyn Detokenize> = detokenizer;
        check(&detokenizer, &ids, &stops[rng.below(2001, 3) as usize], 0);
    }
}

#[test]
fn a_decoder_that_drops_the_first_space_and_falls_back_to_bytes_matches() {
    let mut pieces: Vec<Piece> = ["", " ", " a", "b", "é", " €", "ab a"].map(Piece::Text).into();
    let texts = pieces.len() as u64;
    pieces.extend("é€😀".bytes().map(Piece::Byte));
    let detokenizer: Arc<dyn Detokenize> = Arc::new(Pieces(pieces));
    let characters: [&[u32]; 3] = [&[7, 8], &[9, 10, 11], &[12, 13, 14, 15]];
    for case in 0..2000 {
        let rng = Rng::new(&[33, case]);
        let mut ids = Vec::new();
        for i in 0..30 {
            // A decoder that takes back whole characters of a run has no exact stream: one character
            // in bytes, then a text.
            if i % 2 == 0 && rng.below(i, 2) == 0 {
                ids.extend(characters[rng.below(100 + i, 3) as usize]);
            } else {
                ids.push(rng.below(200 + i, texts) as u32);
            }
            if i % 2 == 0 {
                ids.push(3);
            }
        }
        let text = detokenizer.text(&ids);
        check(&detokenizer, &ids, &random_stops(rng, &text), 0);
    }
}

#[test]
fn runs_of_bytes_that_a_decoder_takes_back_do_not_panic() {
    let pieces = "éa€".bytes().map(Piece::Byte).collect();
    let detokenizer: Arc<dyn Detokenize> = Arc::new(Pieces(pieces));
    for case in 0..2000 {
        let rng = Rng::new(&[34, case]);
        let mut stream = TextStream::new(detokenizer.clone(), &sampling(&["€é".to_owned()], 0));
        let mut text = String::new();
        (0..60).for_each(|i| text += &stream.push(rng.below(i, 6) as u32));
        text += &stream.finish();
        assert!(text.len() <= 60 * 3);
    }
}

#[test]
fn the_first_of_several_stops_cuts_and_a_longer_one_holds_text_back() {
    let tokens = [&b"x<"[..], b"en", b"d", b">y", b" en", b"<end"].map(<[u8]>::to_vec).to_vec();
    let detokenizer = Arc::new(Bytes { tokens, longest: AtomicUsize::new(0) });
    let settings = sampling(&["<end>".to_owned(), "d>".to_owned()], 0);
    let mut stream = TextStream::new(detokenizer.clone(), &settings);
    assert_eq!([0, 1, 2, 3].map(|token| stream.push(token)), ["x", "", "", ""]);
    assert!(stream.stopped());
    let mut stream = TextStream::new(detokenizer, &settings);
    assert_eq!([0, 4, 5].map(|token| stream.push(token)), ["x", "< en", ""]);
    assert_eq!(stream.finish(), "<end");
}
