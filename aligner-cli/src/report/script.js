const tip = document.getElementById("tip");
const short = v => Math.abs(v) >= 1e-3 && Math.abs(v) < 1e6 || v === 0 ? String(+v.toPrecision(5)) : v.toExponential(3);
for (const chart of document.querySelectorAll(".chart[data-series]")) {
  const series = JSON.parse(chart.dataset.series), svg = chart.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const [x0, x1] = svg.dataset.x.split(",").map(Number), left = 58, right = 480 - 14;
  const steps = [...new Set(series.flatMap(s => s.points.map(p => p[0])))].sort((a, b) => a - b);
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 480;
    const at = x0 + (x - left) / (right - left) * (x1 - x0);
    const step = steps.reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a);
    const place = left + (step - x0) / (x1 - x0) * (right - left);
    cursor.setAttribute("x1", place); cursor.setAttribute("x2", place); cursor.style.visibility = "visible";
    const lines = series.flatMap(s => s.points.filter(p => p[0] === step).map(p => `${s.label}  ${short(p[1])}`));
    tip.textContent = [`step ${step}`, ...lines].join("\n");
    tip.style.visibility = "visible";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  svg.addEventListener("mouseleave", () => { tip.style.visibility = cursor.style.visibility = "hidden"; });
}
