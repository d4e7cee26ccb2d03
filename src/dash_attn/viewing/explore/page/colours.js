// Colours: viridis by Q tile, as in the pictures of `plan --gantt`; blues and oranges by the kind of head of a unit.

const VIRIDIS = ["#482374", "#443a83", "#3c508b", "#33638d", "#2a768e", "#228a8d", "#1f9e89", "#2fb47c", "#54c568", "#86d549", "#bddf26", "#fde725"];
const BLUES = ["#abcfe6", "#6aaed6", "#3787c0", "#1b69af"];
const ORANGES = ["#fdc28b", "#fda057", "#f67824", "#e25508"];
const REDUCE_SHADE = 0.62; // a reduce has its Q tile's colour, darker
const NAMES = ["ink", "muted", "paper", "panel", "line", "idle", "stall", "stall-pale", "bound", "chosen", "startup", "add", "chain", "agree"];

function rgbOf(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** A colour between the stops, at a share from 0 to 1. */
function between(stops, share) {
  const place = share * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const [a, b] = [rgbOf(stops[low]), rgbOf(stops[low + 1])];
  return a.map((value, i) => value + (b[i] - value) * (place - low));
}

function css([r, g, b]) {
  return `rgb(${Math.round(r)},${Math.round(g)},${Math.round(b)})`;
}

/** Dark or white, whichever reads better on a colour. */
function textOn([r, g, b]) {
  const light = 0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2;
  return light > 0.24 ? "#222" : "#fff";
}

/** The colours of the page as it is now, light or dark. */
function themeColours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** The colours of bars, by number: first those of the run, then stall, start-up and add. */
class Palette {
  constructor(own, theme) {
    this.rgb = [...own, ...[theme.stall, theme.startup, theme.add].map(rgbOf)];
    this.css = this.rgb.map(css);
    this.text = this.rgb.map(textOn);
    this.flat = new Float32Array(this.rgb.flat());
    this.idle = rgbOf(theme.idle);
  }
}

function tileColours(tiles) {
  const computes = Array.from({ length: tiles }, (_, tile) => between(VIRIDIS, tiles > 1 ? tile / (tiles - 1) : 0.5));
  return [...computes, ...computes.map((colour) => colour.map((value) => value * REDUCE_SHADE))];
}
