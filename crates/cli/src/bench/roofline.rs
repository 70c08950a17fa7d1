//! `--roofline`: stages as points under the roofs of the machine.
//!
//! Across: operations per byte, both the least a stage needs. Up: operations a second. A stage can be no higher than
//! the slope (bytes a second) and the ceilings (operations a second of either kind). Both axes are logarithmic.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::Value;

use crate::failure::{Failure, Outcome};

/// Size of the picture, and of its margins: left, right, top, bottom.
const SIZE: (f64, f64) = (880.0, 560.0);
const MARGINS: (f64, f64, f64, f64) = (72.0, 28.0, 64.0, 58.0);

/// Width of a letter and height of a line of labels.
const LETTER: (f64, f64) = (6.3, 13.0);

/// Colours for light and for dark surroundings; the picture brings its own ground, for readers that know neither.
const STYLE: &str = "\
text{font:11px system-ui,sans-serif;fill:#24292f}.title{font-size:15px;font-weight:600}.small{fill:#57606a}\
.ground{fill:#fff}.grid{stroke:#d8dee4;stroke-width:1}.roof{fill:none;stroke:#24292f;stroke-width:2}\
.plain{stroke-dasharray:6 4}.lead{stroke:#8c959f;stroke-width:.8}\
.prompt{fill:#0969da}.gen{fill:#bc4c00}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.ground{fill:#0d1117}.grid{stroke:#2a313c}\
.roof{stroke:#e6edf3}.lead{stroke:#6e7681}.prompt{fill:#58a6ff}.gen{fill:#f0883e}}";

/// Draws what a bench printed to a file.
pub fn from_file(svg: &Path, json: &Path) -> Result<Outcome, Failure> {
    let fail = |source| Failure::File { path: json.to_path_buf(), source };
    let text = std::fs::read_to_string(json).map_err(fail)?;
    let bench: Value = serde_json::from_str(&text)
        .map_err(|error| Failure::Usage(format!("{}: is no JSON: {error}", json.display())))?;
    draw(svg, &bench)?;
    Ok(Outcome::Success)
}

/// Draws a bench.
pub fn draw(svg: &Path, bench: &Value) -> Result<(), Failure> {
    let picture = picture(bench).ok_or_else(|| {
        Failure::Usage("nothing to draw: the bench has no peaks or no stages (--no-profile?)".to_string())
    })?;
    std::fs::write(svg, picture).map_err(|source| Failure::File { path: svg.to_path_buf(), source })
}

/// A stage of a test.
struct Point {
    label: String,
    class: &'static str,
    /// Operations per byte.
    intensity: f64,
    /// Operations a second, in billions.
    rate: f64,
}

/// The roofs: operations and bytes a second, in billions.
struct Roofs {
    quantised: (String, f64),
    plain: (String, f64),
    bytes: f64,
}

impl Roofs {
    fn from(bench: &Value) -> Option<Roofs> {
        let peaks = bench["peaks"].as_array()?.last()?;
        let giga = |value: &Value| value.as_f64().map(|x| x / 1e9).filter(|x| x.is_finite() && *x > 0.0);
        let peak = |value: &Value| {
            Some((value["unit"].as_str()?.to_string(), giga(&value["operations_per_second"])?))
        };
        let (quantised, plain) = (peak(&peaks["quantised"])?, peak(&peaks["plain"])?);
        Some(Roofs { quantised, plain, bytes: giga(&peaks["bytes_per_second"])? })
    }
}

/// The stages of the longest prompt and of generation.
fn points(bench: &Value) -> Option<Vec<Point>> {
    let results = bench["results"].as_array()?;
    let of = |test: &'static str| {
        let rows = results.iter().filter(move |row| row["test"] == test && row["stages"].is_array());
        rows.max_by_key(|row| row["tokens"].as_u64())
    };
    let mut points = Vec::new();
    for (test, row) in ["prompt", "gen"].into_iter().filter_map(|test| Some((test, of(test)?))) {
        for stage in row["stages"].as_array()? {
            let number = |name: &str| stage[name].as_f64().filter(|x| x.is_finite() && *x > 0.0);
            let numbers = (number("operations"), number("bytes"), number("milliseconds"));
            let (Some(operations), Some(bytes), Some(ms)) = numbers else { continue };
            let share = number("of_peak").map_or(String::new(), |share| format!(" {:.0} %", 100.0 * share));
            let label = format!("{}{share}", stage["stage"].as_str()?);
            points.push(Point {
                label,
                class: test,
                intensity: operations / bytes,
                rate: operations / ms / 1e6,
            });
        }
    }
    Some(points).filter(|points| !points.is_empty())
}

/// Bounds around all of the numbers, with some room: logarithms.
fn bounds(numbers: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let low = numbers.clone().fold(f64::INFINITY, f64::min).log10();
    let high = numbers.fold(f64::NEG_INFINITY, f64::max).log10();
    (low - 0.35, high + 0.3)
}

/// Where numbers lie in the picture.
struct Axes {
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    fn left(&self, intensity: f64) -> f64 {
        let width = SIZE.0 - MARGINS.0 - MARGINS.1;
        MARGINS.0 + width * (intensity.log10() - self.x.0) / (self.x.1 - self.x.0)
    }

    fn top(&self, rate: f64) -> f64 {
        let height = SIZE.1 - MARGINS.2 - MARGINS.3;
        SIZE.1 - MARGINS.3 - height * (rate.log10() - self.y.0) / (self.y.1 - self.y.0)
    }
}

fn picture(bench: &Value) -> Option<String> {
    let (roofs, points) = (Roofs::from(bench)?, points(bench)?);
    let axes = Axes {
        // The knee of the higher roof is in the picture.
        x: bounds(points.iter().map(|p| p.intensity).chain([2.0 * roofs.quantised.1 / roofs.bytes])),
        y: bounds(points.iter().map(|p| p.rate).chain([roofs.quantised.1, roofs.plain.1])),
    };
    let (width, height) = SIZE;
    let mut svg = String::new();
    let out = &mut svg;
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\">\
         <style>{STYLE}</style><rect class=\"ground\" width=\"{width}\" height=\"{height}\" rx=\"8\"/>"
    );
    titles(out, bench);
    grid(out, &axes);
    let taken = draw_roofs(out, &axes, &roofs);
    draw_points(out, &axes, &points, taken);
    out.push_str("</svg>\n");
    Some(svg)
}

fn text(out: &mut String, (x, y): (f64, f64), attributes: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{words}</text>");
}

fn titles(out: &mut String, bench: &Value) {
    let word = |name: &str| bench[name].as_str().unwrap_or("?").to_string();
    let title = format!("{} on {} {}", word("description"), word("backend"), word("kernels"));
    let threads = bench["threads"].as_u64().map_or(String::new(), |n| format!(", {n} threads"));
    text(out, (MARGINS.0, 26.0), "class=\"title\"", &(title + &threads));
    let longest = |test: &str| {
        let rows = bench["results"].as_array().into_iter().flatten();
        let row = rows.filter(|row| row["test"] == test).max_by_key(|row| row["tokens"].as_u64())?;
        Some((row["tokens"].as_u64()?, row["median"].as_f64()?))
    };
    let mut x = MARGINS.0;
    for (test, what) in [("prompt", "prompt of"), ("gen", "generation of")] {
        let Some((tokens, rate)) = longest(test) else { continue };
        mark(out, (x + 5.0, 44.0), test);
        let words = format!("{what} {tokens} tokens, {rate:.1} tokens/s");
        text(out, (x + 14.0, 48.0), "", &words);
        x += 34.0 + LETTER.0 * words.len() as f64;
    }
}

fn mark(out: &mut String, (x, y): (f64, f64), class: &str) {
    let _ = match class {
        "gen" => writeln!(out, "<path class=\"gen\" d=\"M{x:.1} {:.1}l5 5l-5 5l-5 -5z\"/>", y - 5.0),
        _ => writeln!(out, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4.2\"/>"),
    };
}

fn line(out: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(
        out,
        "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
    );
}

/// A power of ten for people.
fn power(exponent: i32) -> String {
    let number = 10f64.powi(exponent);
    if exponent < 0 { format!("{number:.*}", -exponent as usize) } else { format!("{number}") }
}

fn grid(out: &mut String, axes: &Axes) {
    let (right, bottom) = (SIZE.0 - MARGINS.1, SIZE.1 - MARGINS.3);
    let whole = |(low, high): (f64, f64)| low.ceil() as i32..=high.floor() as i32;
    for exponent in whole(axes.x) {
        let x = axes.left(10f64.powi(exponent));
        line(out, "grid", (x, MARGINS.2), (x, bottom));
        text(out, (x, bottom + 18.0), "class=\"small\" text-anchor=\"middle\"", &power(exponent));
    }
    for exponent in whole(axes.y) {
        let y = axes.top(10f64.powi(exponent));
        line(out, "grid", (MARGINS.0, y), (right, y));
        text(out, (MARGINS.0 - 8.0, y + 4.0), "class=\"small\" text-anchor=\"end\"", &power(exponent));
    }
    let middle = (MARGINS.0 + right) / 2.0;
    text(out, (middle, SIZE.1 - 16.0), "text-anchor=\"middle\"", "operations per byte, least of both");
    let y = (MARGINS.2 + bottom) / 2.0;
    let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 18 {y:.1})\"");
    text(out, (18.0, y), &turned, "billions of operations a second");
}

/// Draws the roofs; returns what labels should not hide.
fn draw_roofs(out: &mut String, axes: &Axes, roofs: &Roofs) -> Vec<Box> {
    let ((unit, high), (plain_unit, plain)) = (&roofs.quantised, &roofs.plain);
    let (first, last) = (10f64.powf(axes.x.0), 10f64.powf(axes.x.1));
    let start = first.max(10f64.powf(axes.y.0) / roofs.bytes);
    let at = |intensity: f64, rate: f64| (axes.left(intensity), axes.top(rate));
    let mut taken = Vec::new();
    let mut ceiling = |out: &mut String, class: &str, unit: &str, peak: f64| {
        let ((x, y), (right, _)) = (at((peak / roofs.bytes).max(first), peak), at(last, peak));
        line(out, class, (x, y), (right, y));
        let words = format!("{unit}: {peak:.0} billion a second");
        text(out, (x + 22.0, y - 6.0), "", &words);
        let width = LETTER.0 * words.len() as f64;
        taken.extend([[x, y - 2.0, right, y + 2.0], [x + 22.0, y - 18.0, x + 22.0 + width, y]]);
    };
    ceiling(out, "roof", unit, *high);
    if plain_unit != unit {
        ceiling(out, "roof plain", plain_unit, *plain);
    }
    let (x, y) = at(start, start * roofs.bytes);
    let (x2, y2) = at((high / roofs.bytes).max(first), *high);
    line(out, "roof", (x, y), (x2, y2));
    let along = |part: f64| (x + part * (x2 - x), y + part * (y2 - y));
    // The line, and its words above it.
    taken.extend((0..=60).map(|step| {
        let (x, y) = along(f64::from(step) / 60.0);
        [x - 5.0, y - 5.0, x + 5.0, y + 5.0]
    }));
    let angle = (y2 - y).atan2(x2 - x).to_degrees();
    let (x, y) = along(0.55);
    let turned = format!("text-anchor=\"middle\" transform=\"rotate({angle:.1} {x:.1} {y:.1})\"");
    text(out, (x, y - 7.0), &turned, &format!("memory: {:.1} GB/s", roofs.bytes));
    taken
}

/// A rectangle: left, top, right, bottom.
type Box = [f64; 4];

fn overlap(a: &Box, b: &Box) -> bool {
    a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]
}

/// Points and their labels; a label goes where it hides nothing, as near as that is.
fn draw_points(out: &mut String, axes: &Axes, points: &[Point], mut taken: Vec<Box>) {
    let places: Vec<(f64, f64)> =
        points.iter().map(|point| (axes.left(point.intensity), axes.top(point.rate))).collect();
    taken.extend(places.iter().map(|&(x, y)| [x - 5.0, y - 5.0, x + 5.0, y + 5.0]));
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by(|&a, &b| places[a].1.total_cmp(&places[b].1));
    for index in order {
        let (point, place) = (&points[index], places[index]);
        let width = LETTER.0 * point.label.chars().count() as f64;
        let (spot, far) = spot(place, width, &taken);
        taken.push([spot.0, spot.1 - LETTER.1 + 3.0, spot.0 + width, spot.1 + 3.0]);
        if far {
            let near = if spot.0 > place.0 { spot.0 - 2.0 } else { spot.0 + width + 2.0 };
            line(out, "lead", place, (near, spot.1 - 4.0));
        }
        mark(out, place, point.class);
        // Fonts differ in width: the end next to the point stays where it is.
        match spot.0 > place.0 {
            true => text(out, spot, "", &point.label),
            false => text(out, (spot.0 + width, spot.1), "text-anchor=\"end\"", &point.label),
        }
    }
}

/// Where a label of some width begins, and whether that is far from its point.
fn spot((x, y): (f64, f64), width: f64, taken: &[Box]) -> ((f64, f64), bool) {
    let fits = |&(left, base): &(f64, f64)| {
        let label = [left, base - LETTER.1 + 3.0, left + width, base + 3.0];
        label[0] >= MARGINS.0
            && label[2] <= SIZE.0 - 4.0
            && label[1] >= MARGINS.2
            && label[3] <= SIZE.1 - MARGINS.3
            && !taken.iter().any(|other| overlap(&label, other))
    };
    for ring in 0..14 {
        let down = f64::from(ring) * 7.0;
        let out = 9.0 + if ring > 1 { 10.0 } else { 0.0 };
        let sides = [
            (x + out, y + 4.0 + down),
            (x + out, y + 4.0 - down),
            (x - out - width, y + 4.0 + down),
            (x - out - width, y + 4.0 - down),
        ];
        if let Some(found) = sides.into_iter().find(fits) {
            return (found, ring > 1);
        }
    }
    ((x + 9.0, y + 4.0), false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn bench() -> Value {
        let stage = |name: &str, operations: f64, bytes: f64| json!({ "stage": name, "operations": operations, "bytes": bytes, "milliseconds": 10.0, "of_peak": 0.5 });
        json!({
            "description": "a <model>", "backend": "cpu", "kernels": "k", "threads": 2,
            "peaks": [{
                "quantised": { "unit": "int8", "operations_per_second": 1e12 },
                "plain": { "unit": "f32", "operations_per_second": 2e11 },
                "bytes_per_second": 3e10,
            }],
            "results": [
                { "test": "prompt", "tokens": 64, "median": 1.0, "stages": [stage("short", 1e9, 1e6)] },
                { "test": "prompt", "tokens": 512, "median": 2.0,
                  "stages": [stage("embed", 0.0, 1e6), stage("experts", 3e9, 1e6), stage("route", 3e9, 1e6)] },
                { "test": "gen", "tokens": 8, "median": 3.0, "stages": [stage("head", 1e7, 1e7)] },
            ],
        })
    }

    #[test]
    fn stages_of_the_longest_prompt_and_of_generation_are_drawn() {
        let svg = picture(&bench()).unwrap();
        for words in [
            "experts 50 %",
            "route 50 %",
            "head 50 %",
            "int8: 1000",
            "f32: 200",
            "30.0 GB/s",
            "a &lt;model&gt;",
        ] {
            assert!(svg.contains(words), "no `{words}` in {svg}");
        }
        assert!(!svg.contains("short") && !svg.contains("embed"), "{svg}");
        assert!(svg.contains("prefers-color-scheme:dark") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn labels_do_not_hide_one_another() {
        let mut taken = Vec::new();
        for _ in 0..8 {
            let (spot, _) = spot((400.0, 300.0), 60.0, &taken);
            let label = [spot.0, spot.1 - LETTER.1 + 3.0, spot.0 + 60.0, spot.1 + 3.0];
            assert!(!taken.iter().any(|other| overlap(&label, other)), "{label:?} {taken:?}");
            taken.push(label);
        }
    }

    #[test]
    fn what_has_no_profile_is_not_drawn() {
        let mut without = bench();
        without["peaks"] = json!([]);
        assert!(picture(&without).is_none());
        let mut without = bench();
        without["results"] = json!([{ "test": "gen", "tokens": 1, "median": 1.0 }]);
        assert!(picture(&without).is_none());
        assert!(picture(&json!({})).is_none() && picture(&json!([1])).is_none());
        let mut odd = bench();
        odd["peaks"][0]["bytes_per_second"] = json!(0);
        assert!(picture(&odd).is_none());
    }

    #[test]
    fn axes_hold_their_numbers() {
        let (low, high) = bounds([0.02, 30.0].into_iter());
        assert!(10f64.powf(low) < 0.02 && 10f64.powf(high) > 30.0);
        let axes = Axes { x: (0.0, 2.0), y: (0.0, 3.0) };
        assert_eq!((axes.left(1.0), axes.left(100.0)), (MARGINS.0, SIZE.0 - MARGINS.1));
        assert_eq!((axes.top(1.0), axes.top(1000.0)), (SIZE.1 - MARGINS.3, MARGINS.2));
        assert_eq!(
            (power(-2), power(0), power(4)),
            ("0.01".to_string(), "1".to_string(), "10000".to_string())
        );
    }
}
