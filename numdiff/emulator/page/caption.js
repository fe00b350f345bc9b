// The sentence above the views: what the chosen warp does in this step.

function wavefronts(array, access) {
  // how often shared memory is visited: distinct words of the busiest bank
  if (access.size > 4 || !array.single) return 1;
  const banks = new Map();
  for (const place of access.places) {
    const word = (array.address + place * array.size) >> 2,
      bank = word & 31;
    if (!banks.has(bank)) banks.set(bank, new Set());
    banks.get(bank).add(word);
  }
  return Math.max(...[...banks.values()].map(words => words.size));
}

function sectors(array, access) {
  // of 32 bytes of global memory
  const found = new Set();
  for (const place of access.places)
    for (let byte = 0; byte < access.size; byte += 32) found.add((array.address + place * array.size + byte) >> 5);
  return found.size;
}

function lanesIn(mask, threads) {
  const count = bits(mask);
  if (count === threads) return count === 1 ? "its only lane" : `all ${count} lanes`;
  const first = 31 - Math.clz32(mask & -mask),
    last = 31 - Math.clz32(mask);
  return count === 1 ? `lane ${first}` : last - first + 1 === count ? `lanes ${first} to ${last}` : `${count} lanes`;
}

function caption(launch, step, selected) {
  const row = launch.rows[selected.row],
    {line, mask, now} = launch.at(row, step),
    wait = launch.waiting(row, step);
  const target = $("caption"),
    place = line < 0 ? null : launch.lineOf.get(line),
    parts = [];
  const bold = element("b", "", said(launch, selected.row)[0].toUpperCase() + said(launch, selected.row).slice(1));
  if (now) {
    const [name, file, first, text] = launch.sources[place.source];
    parts.push(
      bold,
      `: ${lanesIn(mask, row.threads)} at line ${first + place.line}. `,
      element("code", "", text[place.line]?.trim() ?? ""),
    );
    for (const access of launch.during(step))
      if (access.row === row.number && parts.length < 18) {
        const array = launch.arrays[access.array],
          part = array.parts.findLast(p => p[2] <= access.places[0]) || array.parts[0];
        parts.push(
          `  ·  ${access.kind === READ ? "reads" : "writes"} `,
          `${plural(access.places.length * access.per, array.single ? "element" : "cell")} of ${part?.[0] ?? "memory"}`,
        );
        if (array.space === "shared" && wavefronts(array, access) > 1)
          parts.push(" ", element("span", "bad", `${wavefronts(array, access)}-way bank conflict`));
        if (array.space === "global" && array.single) parts.push(`, ${plural(sectors(array, access), "sector")}`);
      }
  } else if (wait) {
    const [, , first] = launch.sources[launch.lineOf.get(wait.line ?? line)?.source ?? 0];
    parts.push(
      bold,
      `: ${lanesIn(wait.mask, row.threads)} wait${bits(wait.mask) === 1 ? "s" : ""} for ${wait.text}` +
        (place ? `, line ${first + place.line}, until step ${wait.until}` : ""),
    );
  } else parts.push(bold, step > row.end && row.steps.length ? " has ended." : " has not begun.");
  const fault = launch.faults[selected.fault];
  if (fault) {
    const other = fault.others[0],
      said = element("span", "bad", `  ⚠ ${fault.kind}: ${fault.message}`);
    parts.push(element("br"), said);
    if (other) {
      const line = number => launch.sources[launch.lineOf.get(number).source][2] + launch.lineOf.get(number).line;
      const thread = index => (index ? `, thread (${index.join(", ")})` : "");
      parts.push(` (line ${line(fault.line)}${thread(fault.thread)}; `);
      parts.push(`${other[0]} line ${line(other[1])}${thread(other[2])})`);
    }
  }
  target.replaceChildren(...parts);
}
