//! A page with a plot of every kind, and with what is hard for each: gaps, one point, names that are too long, markup in names.

use hotset::report::{
    Axis, BarPlot, Bars, HeatMap, Interval, IntervalPlot, Line, LinePlot, Page, Point, PointPlot, Points, Section,
    Table,
};

pub fn page() -> Page {
    let mut page = Page::new("Plots of <every> kind & sort");
    page.lead("Made numbers.");
    for section in [lines(), bars(), fronts(), intervals(), heat()] {
        page.section(section.expect("a section"));
    }
    page
}

fn lines() -> hotset::Result<Section> {
    let mut section = Section::new("Lines");
    let mut plot = LinePlot::new(
        "Three lines, one a bound",
        Axis::new("slots a layer").whole(),
        Axis::new("hit rate").percent().from(0.0).to(1.0),
    );
    for (i, name) in ["lru", "lfu", "belady"].into_iter().enumerate() {
        let y = |x: f64| 1.0 - (-x / (40.0 - 10.0 * i as f64)).exp();
        let points: Vec<(f64, f64)> = (0..128).map(|x| (f64::from(x), y(f64::from(x)))).collect();
        let band = if i == 0 { points.iter().map(|&(x, y)| (x, y - 0.03, y + 0.03)).collect() } else { Vec::new() };
        plot.lines.push(Line { name: name.into(), points, band, dashed: i == 2, dots: false });
    }
    section.plot(&plot, "The band is made up.")?;
    let mut plot =
        LinePlot::new("Few points and a gap, over decades", Axis::new("time, ms").log(), Axis::new("tokens/s"));
    let points = vec![(1.0, 5.0), (4.0, 7.5), (9.0, f64::NAN), (30.0, 4.0), (700.0, 4.5)];
    plot.lines.push(Line { name: "run".into(), points, ..Line::default() });
    plot.marks.push((30.0, "turn 2".into()));
    section.plot(&plot, "")?;
    let nothing = LinePlot::new("Nothing at all", Axis::new("x"), Axis::new("y"));
    section.plot(&nothing, "No numbers were given.")?;
    Ok(section)
}

fn bars() -> hotset::Result<Section> {
    let mut section = Section::new("Bars");
    let names = ["lru", "belady_bypass", "a policy with a name that no phone has room for"].map(String::from);
    let mut plot =
        BarPlot { title: "Misses".into(), x: Axis::new("misses a token"), names: names.into(), series: Vec::new() };
    for slots in [16.0, 32.0] {
        let values = [Some(40.2 - slots), Some(20.25 - slots / 2.0), None].into();
        plot.series.push(Bars { name: format!("{slots} slots"), values });
    }
    section.plot(&plot, "The last one has none.")?;
    let mut table = Table::new(["fact", "value"]);
    table.row(["<td>", "1 234"]);
    section.heading("A table").table(&table).facts(&[("hit rate", "74.9 %".into()), ("experts", "128".into())]);
    Ok(section)
}

fn fronts() -> hotset::Result<Section> {
    let mut section = Section::new("Fronts");
    let mut plot = PointPlot {
        title: "Reads and mass".into(),
        x: Axis::new("mass lost").percent().from(0.0),
        y: Axis::new("read, MB a token").from(0.0),
        series: Vec::new(),
    };
    for slots in [16, 48] {
        let point = |i: u32| {
            let x = f64::from(i) * 0.02;
            let small = i % 3 == 2;
            let what = format!("F {:.2}", f64::from(i) * 0.25);
            let y = 400.0 / f64::from(slots) / (1.0 + 6.0 * x) + if small { 3.0 } else { 0.0 };
            Point { x, y, label: (!small).then(|| what.clone()), what, small }
        };
        plot.series.push(Points { name: format!("{slots} slots"), points: (0..9).map(point).collect(), joined: true });
    }
    section.plot(&plot, "")?;
    Ok(section)
}

fn intervals() -> hotset::Result<Section> {
    let mut section = Section::new("Intervals");
    let row = |i: usize| Interval {
        name: format!("arm {i}"),
        series: i,
        low: -4.0 + i as f64,
        middle: 1.5 * i as f64 - 1.0,
        high: 5.0 + i as f64,
        quartiles: (i > 1).then_some((i as f64 - 1.0, i as f64 + 2.5)),
        dots: if i == 3 { vec![-6.0, 12.5] } else { Vec::new() },
    };
    let plot = IntervalPlot {
        title: "Change of tokens/s, with 95 % intervals".into(),
        x: Axis::new("change, %"),
        rows: (0..4).map(row).collect(),
        reference: Some(0.0),
    };
    section.plot(&plot, "")?;
    Ok(section)
}

fn heat() -> hotset::Result<Section> {
    let mut section = Section::new("Heat");
    let (rows, columns) = (24, 160);
    let mut map = HeatMap::new("Misses by step and layer", "step", "layer", Axis::new("misses").whole());
    map.columns = (0..columns).map(|c| c.to_string()).collect();
    map.rows = (0..rows).map(|r| r.to_string()).collect();
    map.cells = (0..rows * columns).map(|i| (i % 977 != 5).then(|| f64::from(i as u32 * 7919 % 11))).collect();
    map.details = (0..rows * columns).map(|i| format!("experts {i} </script>")).collect();
    map.flagged = Some(("dropped".into(), (0..rows * columns).map(|i| i % 331 == 0).collect()));
    section.plot(&map, "Every cell is made up.")?;
    Ok(section)
}
