//! The picture of `experts`: layers × experts as a heat map, and what caches of different sizes find.

use std::fmt::Write as _;

use super::{Budget, Report};

/// Left edge of both drawings, and the width of each.
const LEFT: f64 = 56.0;
const WIDTH: f64 = 1024.0;

/// Top of the heat map; height of a layer.
const TOP: f64 = 64.0;
const LAYER: f64 = 9.0;

/// Height of the curves, and the room above them.
const CURVES: f64 = 260.0;
const GAP: f64 = 84.0;

/// Steps of colour, from hardly used to most used.
const STEPS: usize = 8;

/// Colours for light and for dark surroundings; the picture brings its own ground, for readers that know neither.
const STYLE: &str = "\
text{font:11px system-ui,sans-serif;fill:#24292f}.title{font-size:15px;font-weight:600}.small{fill:#57606a}\
.ground{fill:#fff}.empty{fill:#f3f5f7}.grid{stroke:#d8dee4;stroke-width:1}\
.h1{fill:#fde8d7}.h2{fill:#fccfa9}.h3{fill:#f8b27c}.h4{fill:#f0914f}.h5{fill:#dd6f2b}.h6{fill:#bb5114}.h7{fill:#8f3a0b}\
.h8{fill:#5c2405}\
.curve{fill:none;stroke-width:2}.recent{stroke:#57606a}.ahead{stroke:#bc4c00}.clairvoyant{stroke:#0969da}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.ground{fill:#0d1117}.empty{fill:#161b22}\
.grid{stroke:#2a313c}\
.h1{fill:#3a1d0b}.h2{fill:#5a2b0d}.h3{fill:#7d3b0f}.h4{fill:#a44d12}.h5{fill:#cc6420}.h6{fill:#ee8641}.h7{fill:#fbb37f}\
.h8{fill:#ffe3cc}\
.recent{stroke:#9198a1}.ahead{stroke:#f0883e}.clairvoyant{stroke:#58a6ff}}";

/// The picture as SVG.
pub fn draw(report: &Report) -> String {
    let layers = report.recorder.counts.len() as f64;
    let curves = TOP + layers * LAYER + GAP;
    let (width, height) = (LEFT + WIDTH + 24.0, curves + CURVES + 56.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\"><style>{STYLE}</style><rect class=\"ground\" width=\"{width}\" height=\"{height}\"/>"
    );
    let spec = &report.model.spec;
    text(&mut out, (LEFT, 26.0), "class=\"title\"", &format!("Experts used: {}", spec.name));
    let tokens = report.warm + report.steps;
    let words = format!(
        "{tokens} tokens; columns: experts of a layer, by falling use; darker (brighter on dark ground): used more often"
    );
    text(&mut out, (LEFT, 46.0), "class=\"small\"", &words);
    heat(&mut out, &report.recorder.counts, spec.moe.used as f64 * tokens as f64);
    draw_curves(&mut out, report, curves);
    out + "</svg>\n"
}

/// One rectangle for each run of equal colour. `choices` of a layer are spread over its experts.
fn heat(out: &mut String, counts: &[Vec<u64>], choices: f64) {
    for (layer, counts) in counts.iter().enumerate() {
        let (y, cell) = (TOP + layer as f64 * LAYER, WIDTH / counts.len() as f64);
        let mut sorted = counts.clone();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let step = |count: u64| level(count as f64 * counts.len() as f64 / choices.max(1.0));
        let mut from = 0;
        for run in sorted.chunk_by(|&a, &b| step(a) == step(b)) {
            let class = match step(run[0]) {
                0 => "empty".to_string(),
                level => format!("h{level}"),
            };
            rect(out, &class, (LEFT + from as f64 * cell, y), (run.len() as f64 * cell, LAYER - 1.0));
            from += run.len();
        }
        if layer % 4 == 0 {
            let place = (LEFT - 8.0, y + LAYER - 1.0);
            text(out, place, "class=\"small\" text-anchor=\"end\"", &layer.to_string());
        }
    }
}

/// The colour of an expert used so many times as often as if all were used alike: 0 for never, then in steps of
/// the square root of two, the middle one around once.
fn level(relative: f64) -> usize {
    if relative <= 0.0 {
        0
    } else {
        ((relative.log2() * 2.0).round() + 4.0).clamp(1.0, STEPS as f64) as usize
    }
}

fn draw_curves(out: &mut String, report: &Report, top: f64) {
    let bottom = top + CURVES;
    let title = format!("Found in a cache while {} tokens were computed one by one", report.steps);
    text(out, (LEFT, top - 34.0), "class=\"title\"", &title);
    let at = |share: f64, rate: f64| (LEFT + WIDTH * share.min(1.0), bottom - CURVES * rate);
    for percent in (0..=100).step_by(20) {
        let part = f64::from(percent) / 100.0;
        line(out, at(0.0, part), at(1.0, part));
        line(out, at(part, 0.0), at(part, 1.0));
        let (x, y) = at(0.0, part);
        text(out, (x - 8.0, y + 4.0), "class=\"small\" text-anchor=\"end\"", &format!("{percent} %"));
        let (x, y) = at(part, 0.0);
        text(out, (x, y + 18.0), "class=\"small\" text-anchor=\"middle\"", &format!("{percent} %"));
    }
    let words = "cache, as a share of all experts";
    text(out, (LEFT + WIDTH / 2.0, bottom + 40.0), "text-anchor=\"middle\"", words);
    let names =
        [("recent", "least recently used"), ("ahead", "with look-ahead"), ("clairvoyant", "clairvoyant")];
    for (index, (class, name)) in names.into_iter().enumerate() {
        let points: Vec<String> = (report.budgets.iter())
            .map(|budget: &Budget| at(report.share(budget), budget.found[index].rate()))
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let _ = write!(out, "<polyline class=\"curve {class}\" points=\"{}\"/>", points.join(" "));
        let x = LEFT + index as f64 * 180.0;
        let y = top - 14.0;
        let _ = write!(out, "<path class=\"curve {class}\" d=\"M{x} {}h22\"/>", y - 4.0);
        text(out, (x + 28.0, y), "", name);
    }
}

fn rect(out: &mut String, class: &str, (x, y): (f64, f64), (width, height): (f64, f64)) {
    let _ = write!(
        out,
        "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/>"
    );
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64)) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = write!(out, "<line class=\"grid\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>");
}

/// Text of ours and of the file: what means something in XML is written otherwise.
fn text(out: &mut String, (x, y): (f64, f64), attributes: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let words: String = words.chars().filter(|c| !c.is_control()).collect();
    let _ = write!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{words}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_rise_with_use() {
        assert_eq!([0.0, 0.01, 1.0, 100.0].map(level), [0, 1, 4, STEPS]);
        let levels: Vec<usize> = (0..100).map(|n| level(f64::from(n) / 10.0)).collect();
        assert!(levels.is_sorted());
    }

    #[test]
    fn a_layer_is_as_wide_as_its_experts_and_names_are_escaped() {
        let mut out = String::new();
        heat(&mut out, &[vec![5, 0, 0, 5], vec![1, 1, 1, 1]], 10.0);
        assert_eq!(out.matches("<rect").count(), 3, "{out}");
        assert_eq!(out.matches("width=\"512.0\"").count(), 2);
        text(&mut out, (0.0, 0.0), "", "a<b>&\u{7}");
        assert!(out.ends_with(">a&lt;b&gt;&amp;</text>"));
    }
}
