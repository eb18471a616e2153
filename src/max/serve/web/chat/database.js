// The records of the page in IndexedDB: conversations, turns, drafts.

const NAME = "chat";
const BATCH = 500;

// Each entry makes a database of its number of one that is older; entries are never changed, only added.
const UPGRADES = [
  (database) => {
    database.createObjectStore("conversations", { keyPath: "id" });
    database.createObjectStore("turns", { keyPath: "id" }).createIndex("conversation", "conversation");
    database.createObjectStore("drafts", { keyPath: "conversation" });
  },
];

const result = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const finished = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error || new Error("the browser has stored nothing"));
  });

/** Opens the database; one in memory where the browser has none, as in some private windows. */
export async function openDatabase(onOutdated) {
  try {
    const request = indexedDB.open(NAME, UPGRADES.length);
    request.onupgradeneeded = (event) => {
      for (const upgrade of UPGRADES.slice(event.oldVersion)) upgrade(request.result, request.transaction);
    };
    const connection = await result(request);
    // another tab has a newer page
    connection.onversionchange = () => {
      connection.close();
      onOutdated();
    };
    return new Database(connection);
  } catch (error) {
    if (error.name === "VersionError") onOutdated();
    return new MemoryDatabase();
  }
}

class Database {
  constructor(connection) {
    this.connection = connection;
    this.lasting = true;
  }

  store(name) {
    return this.connection.transaction(name).objectStore(name);
  }

  get(name, id) {
    return result(this.store(name).get(id));
  }

  all(name) {
    return result(this.store(name).getAll());
  }

  turnsOf(conversation) {
    return result(this.store("turns").index("conversation").getAll(conversation));
  }

  async put(name, ...records) {
    const transaction = this.connection.transaction(name, "readwrite");
    for (const record of records) transaction.objectStore(name).put(record);
    await finished(transaction);
  }

  /** Changes a record that is there: others may have changed other fields of it meanwhile. */
  async change(name, id, changes) {
    const transaction = this.connection.transaction(name, "readwrite");
    const store = transaction.objectStore(name);
    const record = await result(store.get(id));
    const changed = record && { ...record, ...changes };
    if (changed) store.put(changed);
    await finished(transaction);
    return changed;
  }

  async changeAll(name, ids, changes) {
    const transaction = this.connection.transaction(name, "readwrite");
    const store = transaction.objectStore(name);
    for (const id of ids) {
      const request = store.get(id);
      request.onsuccess = () => {
        if (request.result) store.put({ ...request.result, ...changes });
      };
    }
    await finished(transaction);
  }

  /** Adds a turn to its conversation, unless another tab has deleted that. */
  async addTurn(turn, conversationChanges) {
    const transaction = this.connection.transaction(["conversations", "turns"], "readwrite");
    const store = transaction.objectStore("conversations");
    const conversation = await result(store.get(turn.conversation));
    const changed = conversation && { ...conversation, ...conversationChanges };
    if (changed) {
      store.put(changed);
      transaction.objectStore("turns").put(turn);
    }
    await finished(transaction);
    return changed;
  }

  async remove(name, ...ids) {
    const transaction = this.connection.transaction(name, "readwrite");
    for (const id of ids) transaction.objectStore(name).delete(id);
    await finished(transaction);
  }

  async removeConversations(ids) {
    const transaction = this.connection.transaction(["conversations", "turns", "drafts"], "readwrite");
    const turns = transaction.objectStore("turns");
    for (const id of ids) {
      transaction.objectStore("conversations").delete(id);
      transaction.objectStore("drafts").delete(id);
      const keys = turns.index("conversation").getAllKeys(id);
      keys.onsuccess = () => keys.result.forEach((key) => turns.delete(key));
    }
    await finished(transaction);
  }

  /** Yields all turns, in batches. */
  async *batches() {
    let range = null;
    for (;;) {
      const turns = await result(this.store("turns").getAll(range, BATCH));
      if (turns.length) yield turns;
      if (turns.length < BATCH) return;
      range = IDBKeyRange.lowerBound(turns.at(-1).id, true);
    }
  }
}

class MemoryDatabase {
  constructor() {
    this.lasting = false;
    this.stores = { conversations: new Map(), turns: new Map(), drafts: new Map() };
  }

  async get(name, id) {
    return this.stores[name].get(id);
  }

  async all(name) {
    return [...this.stores[name].values()];
  }

  async turnsOf(conversation) {
    return (await this.all("turns")).filter((turn) => turn.conversation === conversation);
  }

  async put(name, ...records) {
    for (const record of records)
      this.stores[name].set(name === "drafts" ? record.conversation : record.id, { ...record });
  }

  async change(name, id, changes) {
    const record = this.stores[name].get(id);
    if (!record) return undefined;
    const changed = { ...record, ...changes };
    this.stores[name].set(id, changed);
    return changed;
  }

  async changeAll(name, ids, changes) {
    for (const id of ids) await this.change(name, id, changes);
  }

  async addTurn(turn, conversationChanges) {
    const changed = await this.change("conversations", turn.conversation, conversationChanges);
    if (changed) await this.put("turns", turn);
    return changed;
  }

  async remove(name, ...ids) {
    ids.forEach((id) => this.stores[name].delete(id));
  }

  async removeConversations(ids) {
    for (const id of ids) {
      this.stores.conversations.delete(id);
      this.stores.drafts.delete(id);
      for (const turn of await this.turnsOf(id)) this.stores.turns.delete(turn.id);
    }
  }

  async *batches() {
    yield [...this.stores.turns.values()];
  }
}
