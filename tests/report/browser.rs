//! Pages in a real browser, without a window: headless Chromium, driven by the DevTools protocol over its pipe. Skipped where there is none.
//!
//! The pipe is file descriptors 3 and 4, which a shell makes of the browser's standard input and output; messages are JSON and end with a NUL.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

/// As a child is started, its arguments are "$@".
const START: &str = r#"exec "$0" "$@" 3<&0 4>&1 0</dev/null 1>/dev/null 2>/dev/null"#;

const FLAGS: &[&str] = &[
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
];

/// HOTSET_CHROMIUM, or what is in PATH under one of its names.
fn program() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("HOTSET_CHROMIUM") {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let found = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))).find(|p| p.is_file());
    if found.is_none() {
        println!("skipped: there is no Chromium (HOTSET_CHROMIUM)");
    }
    found
}

pub struct Browser {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    calls: u64,
    /// What has come in between.
    events: Vec<Value>,
    _profile: tempfile::TempDir,
}

/// How a page is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub width: u32,
    pub dark: bool,
}

/// What was seen of a page.
#[derive(Debug, Default)]
pub struct Seen {
    /// Console messages of errors and warnings, exceptions.
    pub errors: Vec<String>,
    /// Requests other than for the page itself.
    pub requests: Vec<String>,
    /// What the script below found wrong with what is drawn.
    pub layout: Vec<String>,
    /// Background and text colours.
    pub colors: (String, String),
    pub figures: u64,
    /// What the first of each kind of mark tells the pointer.
    pub tips: Vec<String>,
}

impl Browser {
    pub fn start() -> Option<Self> {
        let program = program()?;
        let profile = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", START]).arg(program).args(FLAGS);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg("about:blank");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Some(Self { child, input, output, calls: 0, events: Vec::new(), _profile: profile })
    }

    fn read(&mut self) -> Value {
        let mut bytes = Vec::new();
        self.output.read_until(0, &mut bytes).unwrap();
        assert_eq!(bytes.pop(), Some(0), "the browser is gone");
        serde_json::from_slice(&bytes).unwrap()
    }

    fn call(&mut self, session: &str, method: &str, params: Value) -> Value {
        self.calls += 1;
        let mut message = json!({ "id": self.calls, "method": method, "params": params });
        if !session.is_empty() {
            message["sessionId"] = session.into();
        }
        self.input.write_all(format!("{message}\0").as_bytes()).unwrap();
        self.input.flush().unwrap();
        loop {
            let mut answer = self.read();
            if answer["id"] == self.calls {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].take();
            }
            self.events.push(answer);
        }
    }

    fn wait(&mut self, session: &str, method: &str) {
        let there = |e: &Value| e["method"] == method && e["sessionId"] == session;
        while !self.events.iter().any(there) {
            let event = self.read();
            self.events.push(event);
        }
    }

    fn evaluate(&mut self, session: &str, script: &str) -> Value {
        let params = json!({ "expression": script, "returnByValue": true, "awaitPromise": true });
        let mut answer = self.call(session, "Runtime.evaluate", params);
        assert!(answer["exceptionDetails"].is_null(), "{answer}");
        answer["result"]["value"].take()
    }

    /// Opens a page, looks at it, and points at it.
    pub fn look(&mut self, page: &Path, look: Look) -> Seen {
        self.events.clear();
        let target = self.call("", "Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attach = json!({ "targetId": target, "flatten": true });
        let session = self.call("", "Target.attachToTarget", attach)["sessionId"].as_str().unwrap().to_owned();
        let s = session.as_str();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.call(s, &format!("{domain}.enable"), json!({}));
        }
        let screen = json!({ "width": look.width, "height": 900, "deviceScaleFactor": 1, "mobile": look.width < 600 });
        self.call(s, "Emulation.setDeviceMetricsOverride", screen);
        let scheme = json!({ "name": "prefers-color-scheme", "value": if look.dark { "dark" } else { "light" } });
        self.call(s, "Emulation.setEmulatedMedia", json!({ "features": [scheme] }));
        self.events.clear();
        let url = format!("file://{}", page.display());
        self.call(s, "Page.navigate", json!({ "url": url }));
        self.wait(s, "Page.loadEventFired");
        let found = self.evaluate(s, LAYOUT);
        let tips = self.evaluate(s, TIPS);
        let strings = |v: &Value| v.as_array().unwrap().iter().map(|s| s.as_str().unwrap().to_owned()).collect();
        let mut seen = Seen {
            layout: strings(&found["wrong"]),
            colors: (found["back"].to_string(), found["text"].to_string()),
            figures: found["figures"].as_u64().unwrap(),
            tips: strings(&tips),
            ..Seen::default()
        };
        // What is said before this has been said when it is answered.
        self.evaluate(s, "new Promise(done => setTimeout(done, 50))");
        for event in self.events.drain(..) {
            let params = &event["params"];
            match event["method"].as_str().unwrap_or_default() {
                "Runtime.exceptionThrown" => seen.errors.push(params["exceptionDetails"].to_string()),
                "Runtime.consoleAPICalled" => seen.errors.push(params.to_string()),
                "Log.entryAdded" => seen.errors.push(params["entry"].to_string()),
                "Network.requestWillBeSent" => {
                    let to = params["request"]["url"].as_str().unwrap_or_default();
                    if to != url && !to.starts_with("data:") {
                        seen.requests.push(to.to_owned());
                    }
                }
                _ => {}
            }
        }
        self.call("", "Target.closeTarget", json!({ "targetId": target }));
        seen
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.input.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        let _ = self.child.wait();
    }
}

/// The body is no wider than the screen; every drawing that is meant for this width has a size and nothing else is seen; no text of a drawing is cut off
/// by its edge or lies on another.
const LAYOUT: &str = r#"(() => {
  const wrong = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth || document.body.scrollWidth > root.clientWidth)
    wrong.push(`the page is ${Math.max(root.scrollWidth, document.body.scrollWidth)} wide, the screen ${root.clientWidth}`);
  const figures = [...document.querySelectorAll('figure')];
  for (const figure of figures) {
    const name = figure.querySelector('figcaption').textContent;
    const drawings = [...figure.querySelectorAll('svg[role=img]')].filter(svg => svg.getBoundingClientRect().width > 0);
    if (drawings.length !== 1) wrong.push(`${name}: ${drawings.length} drawings are seen`);
    for (const svg of drawings) {
      const box = svg.getBoundingClientRect();
      if (!svg.getAttribute('aria-label')) wrong.push(`${name}: it has no label`);
      if (box.height < 40) wrong.push(`${name}: ${box.height} high`);
      const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent).map(t => [t.textContent, t.getBoundingClientRect()]);
      for (const [text, t] of texts)
        if (t.left < box.left - 1 || t.right > box.right + 1 || t.top < box.top - 1 || t.bottom > box.bottom + 1)
          wrong.push(`${name}: "${text}" is cut off`);
      const lap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
      texts.forEach(([a, boxA], i) => texts.slice(i + 1).forEach(([b, boxB]) => lap(boxA, boxB) && wrong.push(`${name}: "${a}" lies on "${b}"`)));
    }
  }
  const style = getComputedStyle(document.body);
  return { wrong, figures: figures.length, back: style.backgroundColor, text: style.color };
})()"#;

/// Points at the first seen mark and at the middle of each heat map: what the tip says then.
const TIPS: &str = r#"(() => {
  const seen = e => e.getBoundingClientRect().width > 0;
  const mark = [...document.querySelectorAll('[data-tip]')].find(seen);
  const maps = [...document.querySelectorAll('[data-map]')].filter(seen);
  return [mark, ...maps].filter(e => e).map(e => {
    e.scrollIntoView({ block: 'center' });
    const box = e.getBoundingClientRect();
    const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true };
    e.dispatchEvent(new PointerEvent('pointermove', at));
    const tip = document.getElementById('tip');
    const where = tip.getBoundingClientRect();
    const outside = where.left < 0 || where.right > document.documentElement.clientWidth;
    return tip.hidden ? 'hidden' : outside ? `outside: ${where.left} to ${where.right}` : tip.textContent;
  });
})()"#;
