// The turns of a conversation are a tree: a message that is edited and an answer that is repeated get a sibling.

/** The turns from the first one to a leaf. */
export function pathTo(turns, leaf) {
  const path = [];
  const seen = new Set();
  for (let turn = turns.get(leaf); turn && !seen.has(turn.id); turn = turns.get(turn.parent)) {
    seen.add(turn.id);
    path.push(turn);
  }
  return path.reverse();
}

const byAge = (a, b) => a.created - b.created || (a.id < b.id ? -1 : 1);

function childrenByParent(turns) {
  const children = new Map();
  for (const turn of turns.values()) {
    const parent = turn.parent ?? null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(turn);
  }
  for (const list of children.values()) list.sort(byAge);
  return children;
}

/** For each turn of a path, its siblings, itself included, the oldest first. */
export function siblingsOf(turns, path) {
  const children = childrenByParent(turns);
  return new Map(path.map((turn) => [turn.id, children.get(turn.parent ?? null) || [turn]]));
}

/** The leaf below a turn that was made last. */
export function newestLeaf(turns, turn) {
  const children = childrenByParent(turns);
  const seen = new Set();
  let leaf = turn;
  while (!seen.has(leaf.id)) {
    seen.add(leaf.id);
    leaf = children.get(leaf.id)?.at(-1) ?? leaf;
  }
  return leaf;
}

/** The leaf that a conversation shows: the stored one, or the newest turn where that is gone. */
export function leafOf(conversation, turns) {
  if (turns.has(conversation.leaf)) return conversation.leaf;
  const newest = [...turns.values()].sort(byAge).at(-1);
  return newest ? newest.id : null;
}
