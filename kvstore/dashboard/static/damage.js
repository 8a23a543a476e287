// Damage: what failed verification, where, and what was set aside.

import { ago, bytes, card, el, freshness, id, matches, number, table } from "./dom.js";

const SAID = {
  miss_damaged: "chunks on the root that failed verification: each was a miss and was set aside",
  memory_damaged: "chunks in memory that failed verification: dropped",
  disk_damaged: "chunks on local disks that failed verification: removed",
  peers_damaged: "chunks from other workers that failed verification: asked for elsewhere",
  wire_damaged: "streams of clients that did not match their checksums: refused",
  quarantined: "files set aside",
  quarantine_failed: "files that could not be set aside",
  quarantine_restored: "files set aside in a race and put back",
};

export function damage({ doc, state }) {
  const rows = Object.entries(doc.counts).map(([kind, per]) => ({ kind, per, total: Object.values(per).reduce((a, b) => a + b, 0) })).filter((row) => row.total);
  const files = doc.files.filter((row) => matches(state.filter, row.address, row.session));
  return [
    card("Found by workers since they started", {}, table("Damage by kind", [
      { name: "Kind", sort: (row) => row.kind, cell: (row) => row.kind.replaceAll("_", " ") },
      { name: "Count", right: true, sort: (row) => row.total, cell: (row) => number(row.total) },
      { name: "What it means", cell: (row) => SAID[row.kind] ?? (row.kind.startsWith("damage_") ? "what was wrong with them" : "") },
      { name: "Where", cell: (row) => Object.entries(row.per).filter(([, value]) => value).map(([worker, value]) => el("div", {}, el("bdi", {}, worker), `: ${number(value)}`)) },
    ], rows, { key: (row) => row.kind, sort: state.sort["Damage by kind"] ?? { column: "Count", down: true }, empty: "No damage was found." })),
    card("Quarantine", {},
      doc.quarantine === null ? el("p", { class: "empty" }, "Not listed yet.") : el("p", {}, `${number(doc.quarantine.count)}${doc.quarantine.is_whole ? "" : " or more"} files, ${bytes(doc.quarantine.bytes)}. `, doc.quarantine.count ? ["They are of no harm; ", el("code", {}, "kvstore fsck ROOT --repair"), " puts whole ones back and deletes the others."] : "Nothing is set aside."),
      files.length ? table("Files in quarantine", [
        { name: "Chunk", cell: (row) => id(row.address, 32) },
        { name: "Size", right: true, sort: (row) => row.size_bytes, cell: (row) => bytes(row.size_bytes) },
        { name: "Last used", right: true, sort: (row) => row.last_use_s, cell: (row) => ago(row.last_use_s, doc.now_s) },
        { name: "Set aside by session", cell: (row) => id(row.session) },
      ], files, { key: (row) => `${row.address}${row.session}`, sort: state.sort["Files in quarantine"] }) : null),
    freshness(doc.sources),
  ];
}
