//! The kernels on `CubeCL`'s runtime for processors, against the host kernels and plain code.

mod composition;
mod sampling;

use super::*;
use crate::ops::rows::{self, F32, PAGE, PagedKv, Span, Weight, page_elements, write_kv};
use crate::ops::testing::values;
use crate::ops::{Activation, AttentionShape};

/// The test device.
fn device() -> Accelerator {
    Accelerator::cpu().unwrap()
}

/// Largest difference relative to the largest magnitude of `expected`; infinity where one is not finite.
fn error(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(1e-6f32, |most, value| most.max(value.abs()));
    let pairs = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
    pairs.map(|gap| if gap.is_finite() { gap } else { f32::INFINITY }).fold(0.0, f32::max) / largest
}

#[test]
fn products_match_the_host_and_do_not_depend_on_company() {
    let device = device();
    for (rows, inputs, outputs) in [(1, 64, 33), (2, 20, 7), (5, 37, 12), (19, 128, 40)] {
        let (x, w, bias) = (values(rows * inputs, 1), values(outputs * inputs, 2), values(outputs, 3));
        let base = values(rows * outputs, 4);
        let mut expected = base.clone();
        let weight = Weight::F32(F32::new(&w, outputs, inputs));
        let on_host = rows::Product { weight, bias: Some(&bias), out: &mut expected, add: true };
        rows::products(&x, rows, [on_host]);
        let matrix = Matrix::F32(device.upload(&w), [outputs, inputs]);
        let (bias, base_there) = (device.upload(&bias), device.upload(&base));
        let run = |x: &[f32], base: &Buffer<f32>| {
            let product = Product { weight: &matrix, bias: Some(&bias), add_to: Some(base) };
            device.read(&products(&device, &device.upload(x), &[product]).unwrap()[0]).unwrap()
        };
        let got = run(&x, &base_there);
        assert!(error(&got, &expected) < 2e-6, "{rows} {inputs} {outputs}: {}", error(&got, &expected));
        for row in 0..rows {
            let base = device.upload(&base[row * outputs..][..outputs]);
            let alone = run(&x[row * inputs..][..inputs], &base);
            assert_eq!(alone, got[row * outputs..][..outputs], "row {row} of {rows}");
        }
    }
}

#[test]
fn a_group_of_products_is_its_members() {
    let device = device();
    let (rows, inputs) = (3, 48);
    let x = device.upload(&values(rows * inputs, 1));
    let bias = device.upload(&values(10, 2));
    let matrices = [21, 6, 10, 5].map(|outputs| {
        Matrix::F32(device.upload(&values(outputs * inputs, outputs as u64)), [outputs, inputs])
    });
    let bf16 = Matrix::Bf16(device.upload(&vec![half::bf16::ONE; 2 * inputs]), [2, inputs]);
    let mut group: Vec<Product<'_>> =
        matrices.iter().chain([&bf16]).map(|weight| Product { weight, bias: None, add_to: None }).collect();
    group[2].bias = Some(&bias);
    let together = products(&device, &x, &group).unwrap();
    assert_eq!(together.len(), group.len());
    for (together, product) in together.iter().zip(&group) {
        let alone = products(&device, &x, std::slice::from_ref(product)).unwrap();
        assert_eq!(device.read(together).unwrap(), device.read(&alone[0]).unwrap());
    }
    let wrong = Matrix::F32(device.empty(7 * 5), [5, 7]);
    let message = products(&device, &x, &[Product { weight: &wrong, bias: None, add_to: None }]);
    assert!(message.unwrap_err().to_string().contains("a multiple of 7"));
}

#[test]
fn products_of_bf16_weights_are_those_of_their_values_in_f32() {
    let device = device();
    let (rows, inputs, outputs) = (3, 48, 21);
    let x = device.upload(&values(rows * inputs, 1));
    let halves: Vec<half::bf16> = values(outputs * inputs, 2).into_iter().map(half::bf16::from_f32).collect();
    let wide: Vec<f32> = halves.iter().map(|value| value.to_f32()).collect();
    let shape = [outputs, inputs];
    let run = |weight: &Matrix| {
        let out = products(&device, &x, &[Product { weight, bias: None, add_to: None }]).unwrap();
        device.read(&out[0]).unwrap()
    };
    let got = run(&Matrix::Bf16(device.upload(&halves), shape));
    assert_eq!(got, run(&Matrix::F32(device.upload(&wide), shape)));
}

#[test]
fn norms_and_gates_match_the_host() {
    let device = device();
    for (rows, hidden) in [(1, 16), (3, 37), (4, 256)] {
        let (x, weight, bias) = (values(rows * hidden, 1), values(hidden, 2), values(hidden, 4));
        let [x_there, weight_there, bias_there] = [&x, &weight, &bias].map(|data| device.upload(data));
        for (here, there) in [
            (rows::RowNorm::Rms(&weight, 0.0), RowNorm::Rms(&weight_there, 0.0)),
            (rows::RowNorm::Rms(&weight, 1.0), RowNorm::Rms(&weight_there, 1.0)),
            (rows::RowNorm::Layer(&weight, &bias), RowNorm::Layer(&weight_there, &bias_there)),
        ] {
            let mut expected = vec![0.0; x.len()];
            rows::norm_rows(&x, here, 1e-5, &mut expected);
            let got = device.read(&norm_rows(&device, &x_there, there, 1e-5).unwrap()).unwrap();
            assert!(error(&got, &expected) < 2e-6, "{here:?}");
        }

        // Gates up to 20 reach both tails of the sigmoid.
        let gate: Vec<f32> = x.iter().map(|value| value * 20.0).collect();
        let up = values(x.len(), 3);
        let (gate_there, up_there) = (device.upload(&gate), device.upload(&up));
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let (mut gated, mut alone) = (gate.clone(), gate.clone());
            rows::gate_rows(&mut gated, &up, activation);
            rows::activate_rows(&mut alone, activation);
            let got = gate_rows(&device, &gate_there, &up_there, activation).unwrap();
            assert!(error(&device.read(&got).unwrap(), &gated) < 1e-6);
            let got = activate_rows(&device, &gate_there, activation);
            assert!(error(&device.read(&got).unwrap(), &alone) < 1e-6);
        }
    }
}

#[test]
fn rows_are_opened_capped_cut_scaled_and_added() {
    let device = device();
    let (x, y, opening) = (values(3 * 8, 1), values(3 * 8, 2), values(3, 3));
    let [x_there, y_there, opening_there] = [&x, &y, &opening].map(|data| device.upload(data));
    let read = |buffer: &Buffer<f32>| device.read(buffer).unwrap();
    let (mut opened, mut capped) = (x.clone(), x.clone());
    rows::open_rows(&mut opened, &opening);
    rows::softcap_rows(&mut capped, 0.5);
    assert!(error(&read(&open_rows(&device, &x_there, &opening_there).unwrap()), &opened) < 1e-6);
    assert!(error(&read(&softcap_rows(&device, &x_there, 0.5)), &capped) < 1e-6);
    let part = read(&part_of_rows(&device, &x_there, 8, 2, 3).unwrap());
    assert_eq!(part, [&x[2..5], &x[10..13], &x[18..21]].concat());
    let sum: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 3.0 * x + y).collect();
    assert!(error(&read(&scale_and_add(&device, &x_there, 3.0, Some(&y_there)).unwrap()), &sum) < 1e-6);
    let (rows, weights) = (device.upload(&[2u32, 0]), device.upload(&[0.5f32, -2.0]));
    scatter_add(&device, &y_there, &device.upload(&x[..16]), &rows, &weights).unwrap();
    let mut expected = y.clone();
    expected[16..].iter_mut().zip(&x[..8]).for_each(|(sum, x)| *sum += 0.5 * x);
    expected[..8].iter_mut().zip(&x[8..]).for_each(|(sum, x)| *sum -= 2.0 * x);
    assert!(error(&read(&y_there), &expected) < 1e-6);
    assert!(part_of_rows(&device, &x_there, 8, 6, 3).is_err());
}

#[test]
fn rows_are_gathered_and_ranges_copied() {
    let device = device();
    let table = device.upload(&values(6 * 5, 1));
    let got = gather_rows(&device, &table, 5, &device.upload(&[4u32, 0, 4])).unwrap();
    let (got, table_here) = (device.read(&got).unwrap(), device.read(&table).unwrap());
    assert_eq!(got, [&table_here[20..25], &table_here[..5], &table_here[20..25]].concat());
    copy_range(&device, &table, 5, 20, 10).unwrap();
    let after = device.read(&table).unwrap();
    assert_eq!(after[20..30], table_here[5..15]);
    assert_eq!(after[..20], table_here[..20]);
    assert!(copy_range(&device, &table, 5, 25, 10).is_err());
}

/// Rotated rows, and keys and values in pages, on the host.
struct Rotated {
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

fn rotate_on_host(
    [q, k, v]: [&[f32]; 3],
    (cos, sin): (&[f32], &[f32]),
    slots: &[u32],
    pages: usize,
    shape: AttentionShape,
) -> Rotated {
    let (columns, width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let (mut q, mut k) = (q.to_vec(), k.to_vec());
    rows::rotate_rows(&mut q, columns, cos, sin);
    rows::rotate_rows(&mut k, width, cos, sin);
    let mut keys = vec![0.0; pages * page_elements(shape)];
    let mut values = keys.clone();
    for (row, &slot) in slots.iter().enumerate() {
        let place = (slot / PAGE as u32, slot as usize % PAGE);
        let row = row * width..(row + 1) * width;
        write_kv(&mut keys, &mut values, place, &k[row.clone()], &v[row], shape);
    }
    Rotated { q, keys, values }
}

#[test]
fn rotation_writes_what_the_host_writes() {
    let device = device();
    for (heads, kv_heads, head_dim) in [(4, 2, 16), (3, 1, 20), (2, 2, 8)] {
        let shape = AttentionShape::new(heads, kv_heads, head_dim, 0.3);
        let rows = 5;
        let (columns, width) = (heads * head_dim, kv_heads * head_dim);
        let [q, k, v] = [(columns, 1), (width, 2), (width, 3)].map(|(n, seed)| values(rows * n, seed));
        let angle = |at: usize| (at / (head_dim / 2)) as f32 * 0.7 / (1 + at % (head_dim / 2)) as f32;
        let angles: Vec<f32> = (0..rows * head_dim / 2).map(angle).collect();
        let cos: Vec<f32> = angles.iter().map(|angle| angle.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|angle| angle.sin()).collect();
        let slots = [70, 0, 33, 31, 95];
        let expected = rotate_on_host([&q, &k, &v], (&cos, &sin), &slots, 3, shape);
        let pages = KvPages::new(&device, 3, shape);
        let [q, k, v] = [q, k, v].map(|rows| device.upload(&rows));
        let angles = device.upload(&[cos, sin].concat());
        let qkv = Qkv { q: &q, k: &k, v: &v };
        let got = rotate_and_write(&device, qkv, &angles, &device.upload(&slots), &pages, shape).unwrap();
        assert!(error(&device.read(&got).unwrap(), &expected.q) < 1e-6);
        assert!(error(&device.read(&pages.keys).unwrap(), &expected.keys) < 1e-6);
        assert_eq!(device.read(&pages.values).unwrap(), expected.values);
    }
}

#[test]
fn paged_attention_matches_the_host_whatever_the_chunks() {
    let device = device();
    for (heads, kv_heads, head_dim, softcap, window) in [
        (4, 2, 16, None, None),
        (3, 1, 20, Some(0.5), None),
        (2, 2, 72, None, Some(SPAN + 3)),
        (36, 2, 8, Some(0.5), Some(20)),
    ] {
        let shape = AttentionShape { softcap, window, ..AttentionShape::new(heads, kv_heads, head_dim, 0.3) };
        // Two sequences, the first longer than two spans, their pages in no order.
        let lens = [2 * SPAN + 9, 40];
        let width = kv_heads * head_dim;
        let count = lens.map(|len| len.div_ceil(PAGE));
        let all = count[0] + count[1];
        let table: Vec<u32> = (0..all).map(|at| ((at * 5 + 2) % all) as u32).collect();
        let mut keys = vec![0.0; all * page_elements(shape)];
        let mut stored = keys.clone();
        for (sequence, &len) in lens.iter().enumerate() {
            let (k, v) = (values(len * width, 5 + sequence as u64), values(len * width, 7 + sequence as u64));
            for at in 0..len {
                let page = table[sequence * count[0] + at / PAGE];
                let row = at * width..(at + 1) * width;
                write_kv(&mut keys, &mut stored, (page, at % PAGE), &k[row.clone()], &v[row], shape);
            }
        }
        let pages = KvPages { keys: device.upload(&keys), values: device.upload(&stored) };
        // The last 30 rows of the one, the last 5 of the other.
        let rows = [30, 5];
        let columns = heads * head_dim;
        let q = values((rows[0] + rows[1]) * columns, 9);
        let spans = [
            Span { rows: 0..30, position: lens[0] - 30, pages: 0..count[0] },
            Span { rows: 30..35, position: lens[1] - 5, pages: count[0]..all },
        ];
        let mut expected = vec![0.0; q.len()];
        let kv = PagedKv { keys: &keys, values: &stored };
        rows::paged_attention(&q, kv, (&spans, &table), shape, &mut expected);
        let run = |q: &[f32], spans: &[Span]| {
            let tiles = Tiles::new(&device, (spans, &table), shape).unwrap();
            let out = paged_attention(&device, &device.upload(q), &pages, &tiles, shape).unwrap();
            device.read(&out).unwrap()
        };
        let got = run(&q, &spans);
        assert!(error(&got, &expected) < 2e-6, "{shape:?}: {}", error(&got, &expected));
        for row in [0, 3, 29, 30, 34] {
            let span = &spans[usize::from(row >= 30)];
            let position = span.position + row - span.rows.start;
            let alone = Span { rows: 0..1, position, pages: span.pages.clone() };
            let part = row * columns..(row + 1) * columns;
            assert_eq!(run(&q[part.clone()], &[alone]), got[part], "row {row} alone");
        }
    }
}

#[test]
fn a_batch_past_its_pages_is_refused() {
    let device = device();
    let shape = AttentionShape::new(2, 1, 8, 1.0);
    let span = |position| Span { rows: 0..1, position, pages: 0..1 };
    assert!(Tiles::new(&device, (&[span(32)], &[0]), shape).is_err());
    let tiles = Tiles::new(&device, (&[span(31)], &[3]), shape).unwrap();
    let pages = KvPages::new(&device, 3, shape);
    let message = paged_attention(&device, &device.empty(16), &pages, &tiles, shape).unwrap_err().to_string();
    assert!(message.contains("page 3") && message.contains("3 pages"), "{message}");
}
