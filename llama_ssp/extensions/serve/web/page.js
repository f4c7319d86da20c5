// Asks for one text twice, with the draft and plainly, and shows the rounds as they come.
"use strict";
const $ = (id) => document.getElementById(id);
const NUMBERS = ["max_tokens", "temperature", "seed", "num_draft_tokens"];
const STILL_MS = 5000;
const MOST_TOP = 5;
const tip = Object.assign(document.createElement("div"), { id: "top", hidden: true });
let stops = null;
let forecast = {};

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function body(plain) {
  const asked = { stream: true, return_rounds: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if ($(name).value !== "") asked[name] = Number($(name).value);
  const seed = $("seed").value; // as text: a number of 53 bits would be another seed
  if (/^\d+$/.test(seed)) asked.seed = "@seed";
  const written = (whole) => JSON.stringify(whole).replace('"seed":"@seed"', `"seed":${seed.replace(/^0+(?=\d)/, "")}`);
  if (plain) { delete asked.num_draft_tokens; asked.speculative = false; }
  const prompt = $("prompt").value;
  if ($("chat").checked) return written({ ...asked, messages: [{ role: "user", content: prompt }], logprobs: true, top_logprobs: MOST_TOP });
  return written({ ...asked, prompt, logprobs: MOST_TOP });
}

function element(kind, kinds, text) {
  return Object.assign(document.createElement(kind), { className: kinds, textContent: text });
}

function column(id) {
  const own = $(id), text = own.querySelector(".text"), strip = own.querySelector(".rounds");
  text.replaceChildren(element("span", "prompt", $("chat").checked ? "" : $("prompt").value));
  strip.replaceChildren();
  return { text, strip, speed: own.querySelector(".speed"), tokens: [], rounds: 0, began: 0, mode: id };
}

function showRound(at, round) {
  if (!at.began) at.began = performance.now();
  else at.rounds += 1;
  const bar = element("i", "", "");
  round.tokens.forEach((token, place) => {
    const kind = place < round.num_drafted ? "drafted" : "own";
    if (kind === "own" && round.rejected.length) {
      const struck = element("s", "rejected", ""); // shown by style, so that a copy of the text lacks it
      struck.dataset.text = round.rejected.join("").replaceAll("\n", "\u21b5");
      at.text.append(struck);
    }
    const shown = element("span", `token ${kind}`, token);
    shown.tabIndex = -1;
    at.tokens.push(shown);
    at.text.append(shown);
    bar.append(element("u", kind === "drafted" ? "yes" : "own", ""));
  });
  round.rejected.forEach(() => bar.append(element("u", "", "")));
  at.strip.append(bar);
  showSpeed(at);
}

function showSpeed(at) {
  const later = at.tokens.length - 1, seconds = (performance.now() - at.began) / 1000;
  if (later < 1) return;
  const parts = [element("b", "", `${(later / seconds).toFixed(1)} tokens/s`),
    `, ${(later / Math.max(at.rounds, 1)).toFixed(2)} tokens a round`];
  if (forecast[at.mode]) parts.push(`; forecast with full rows ${(1000 / forecast[at.mode]).toFixed(1)}`);
  at.speed.replaceChildren(...parts);
}

function showTop(at, logprobs) {
  const tops = logprobs.content
    ? logprobs.content.map((one) => one.top_logprobs.map((top) => [top.token, top.logprob]))
    : logprobs.top_logprobs.map((top) => Object.entries(top));
  at.tokens.forEach((token, place) => {
    const sorted = (tops[place] || []).sort((one, other) => other[1] - one[1]);
    token.dataset.top = sorted.map(([text, value]) => `${(100 * Math.exp(value)).toFixed(1).padStart(5)} %  ${JSON.stringify(text)}`).join("\n");
  });
}

async function complete(id, signal) {
  const at = column(id), path = $("chat").checked ? "v1/chat/completions" : "v1/completions";
  let heard = performance.now();
  const watch = setInterval(() => {
    const ms = performance.now() - heard;
    if (ms > STILL_MS) at.speed.replaceChildren(`no token for ${Math.round(ms / 1000)} s: the server is busy, or stands still`);
  }, 1000);
  try {
    const answer = await fetch(path, { method: "POST", headers: headers(), body: body(id === "plain"), signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", found = await reader.read(); !found.done; found = await reader.read()) {
      heard = performance.now();
      const events = (rest + found.value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]" || event.startsWith(":")) continue;
        const message = JSON.parse(data);
        if (message.error) throw new Error(message.error.message);
        for (const choice of message.choices) {
          showRound(at, choice.round);
          if (choice.logprobs) showTop(at, choice.logprobs);
        }
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") at.speed.replaceChildren(element("span", "failed", error.message));
  } finally {
    clearInterval(watch);
  }
}

async function learn() {
  try {
    const models = await (await fetch("v1/models", { headers: headers() })).json();
    $("pair").textContent = models.data ? `${models.data[0].id}.` : "";
    for (const line of (await (await fetch("metrics", { headers: headers() })).text()).split("\n")) {
      const found = line.match(/^llama_ssp_forecast_(\w+)_ms_per_token (.+)$/);
      if (found) forecast[found[1]] = Number(found[2]);
    }
  } catch { /* the answer to a prompt will say why */ }
}

async function go() {
  if (stops) return;
  stops = new AbortController();
  $("go").disabled = true;
  $("stop").disabled = false;
  await learn();
  await Promise.all(["speculative", "plain"].map((id) => complete(id, stops.signal)));
  stops = null;
  $("go").disabled = false;
  $("stop").disabled = true;
  document.body.dataset.done = "yes";
}

function showTip(token) {
  tip.hidden = !token || !token.dataset.top;
  if (tip.hidden) return;
  const place = token.getBoundingClientRect();
  tip.textContent = token.dataset.top;
  tip.style.top = `${place.bottom + window.scrollY + 4}px`;
  tip.style.left = `${Math.max(4, Math.min(place.left, window.innerWidth - 240)) + window.scrollX}px`;
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); go(); });
$("stop").addEventListener("click", () => stops?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  if (event.key === "Escape") stops?.abort();
  const text = event.target.closest?.(".text");
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!text || !step) return;
  const tokens = [...text.querySelectorAll(".token")];
  (tokens[tokens.indexOf(document.activeElement) + step] || tokens[0])?.focus();
  event.preventDefault();
});
document.addEventListener("mouseover", (event) => showTip(event.target.closest(".token")));
document.addEventListener("focusin", (event) => showTip(event.target.closest(".token")));
document.addEventListener("focusout", () => showTip(null));
document.body.append(tip);
const given = new URLSearchParams(location.search); // a link may carry a prompt: /?prompt=import&seed=2
for (const [name, value] of given) if (["prompt", ...NUMBERS].includes(name)) $(name).value = value;
if (given.has("prompt")) go();
else learn();
