-- The tables of a new SQLite file, as the migrations make them; statements end with an empty line.
-- `tests/app/registry/test_database.py` compares the two.

CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
)

CREATE TABLE backbones (
    id INTEGER NOT NULL,
    name VARCHAR(1024) NOT NULL,
    fingerprint VARCHAR(64) NOT NULL,
    num_classes INTEGER NOT NULL,
    labels JSON NOT NULL,
    labels_sha256 VARCHAR(64) NOT NULL,
    created_at DATETIME NOT NULL, model VARCHAR(64) DEFAULT '' NOT NULL,
    CONSTRAINT pk_backbones PRIMARY KEY (id),
    CONSTRAINT uq_backbones_name_fingerprint_labels_sha256 UNIQUE (name, fingerprint, labels_sha256)
)

CREATE TABLE calibrators (
    version INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    backbone_id INTEGER,
    method VARCHAR(128) NOT NULL,
    spec JSON,
    artifact BLOB,
    sha256 VARCHAR(64),
    report JSON,
    reliability_svg BLOB,
    samples INTEGER,
    created_at DATETIME NOT NULL, reliability_png BLOB, pruned_at DATETIME,
    CONSTRAINT fk_calibrators_backbone_id FOREIGN KEY(backbone_id) REFERENCES backbones (id)
)

CREATE INDEX ix_calibrators_backbone_id ON calibrators (backbone_id)

CREATE TABLE activations (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    backbone_id INTEGER NOT NULL,
    version INTEGER NOT NULL,
    reason VARCHAR(32) NOT NULL,
    previous INTEGER,
    created_at DATETIME NOT NULL,
    CONSTRAINT fk_activations_backbone_id FOREIGN KEY(backbone_id) REFERENCES backbones (id),
    CONSTRAINT fk_activations_version FOREIGN KEY(version) REFERENCES calibrators (version),
    CONSTRAINT fk_activations_previous FOREIGN KEY(previous) REFERENCES activations (id)
)

CREATE INDEX ix_activations_backbone_id_id ON activations (backbone_id, id)

CREATE TABLE fits (
    id VARCHAR(32) NOT NULL,
    backbone_id INTEGER NOT NULL,
    owner VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    method VARCHAR(128) NOT NULL,
    activate VARCHAR(16) NOT NULL,
    samples INTEGER NOT NULL,
    progress FLOAT NOT NULL,
    stage VARCHAR(256) NOT NULL,
    calibrator INTEGER,
    activated BOOLEAN,
    decision TEXT,
    error TEXT,
    created_at DATETIME NOT NULL,
    started_at DATETIME,
    finished_at DATETIME,
    seen_at DATETIME NOT NULL, warnings JSON, attempt INTEGER DEFAULT '0' NOT NULL, cancel_requested BOOLEAN DEFAULT 0 NOT NULL, shared BOOLEAN DEFAULT 0 NOT NULL, budget_seconds FLOAT,
    CONSTRAINT pk_fits PRIMARY KEY (id),
    CONSTRAINT fk_fits_backbone_id FOREIGN KEY(backbone_id) REFERENCES backbones (id),
    CONSTRAINT fk_fits_calibrator FOREIGN KEY(calibrator) REFERENCES calibrators (version)
)

CREATE INDEX ix_fits_backbone_id_created_at ON fits (backbone_id, created_at)

CREATE INDEX ix_fits_state ON fits (state)

CREATE TRIGGER calibrators_no_delete BEFORE DELETE ON calibrators BEGIN SELECT RAISE(ABORT, 'calibrators is append-only'); END

CREATE TRIGGER activations_no_update BEFORE UPDATE ON activations BEGIN SELECT RAISE(ABORT, 'activations is append-only'); END

CREATE TRIGGER activations_no_delete BEFORE DELETE ON activations BEGIN SELECT RAISE(ABORT, 'activations is append-only'); END

CREATE TRIGGER calibrators_no_update BEFORE UPDATE ON calibrators WHEN NOT (OLD.pruned_at IS NULL AND NEW.pruned_at IS NOT NULL AND NEW.version IS OLD.version AND NEW.backbone_id IS OLD.backbone_id AND NEW.method IS OLD.method AND NEW.sha256 IS OLD.sha256 AND NEW.samples IS OLD.samples AND NEW.created_at IS OLD.created_at AND NEW.spec IS NULL AND NEW.artifact IS NULL AND NEW.report IS NULL AND NEW.reliability_svg IS NULL AND NEW.reliability_png IS NULL) BEGIN SELECT RAISE(ABORT, 'calibrators is append-only'); END

CREATE TABLE feedback_logs (
    backbone_id INTEGER NOT NULL,
    seq BIGINT NOT NULL,
    row_count BIGINT NOT NULL,
    CONSTRAINT pk_feedback_logs PRIMARY KEY (backbone_id),
    CONSTRAINT fk_feedback_logs_backbone_id FOREIGN KEY(backbone_id) REFERENCES backbones (id)
)

CREATE TABLE feedback (
    backbone_id INTEGER NOT NULL,
    id VARCHAR(64) NOT NULL,
    seq BIGINT NOT NULL,
    version INTEGER,
    predicted_at FLOAT NOT NULL,
    logits BLOB NOT NULL,
    label_seq BIGINT,
    label INTEGER,
    latest_label INTEGER,
    labelled_at FLOAT,
    propensity FLOAT,
    source VARCHAR(64),
    CONSTRAINT pk_feedback PRIMARY KEY (backbone_id, id),
    CONSTRAINT fk_feedback_backbone_id FOREIGN KEY(backbone_id) REFERENCES backbones (id)
)

CREATE INDEX ix_feedback_backbone_id_seq ON feedback (backbone_id, seq)

CREATE INDEX ix_feedback_backbone_id_label_seq ON feedback (backbone_id, label_seq)

CREATE TABLE monitors (
    backbone_id INTEGER NOT NULL,
    seq BIGINT NOT NULL,
    revision BIGINT NOT NULL,
    activation INTEGER NOT NULL,
    state BLOB NOT NULL,
    document JSON NOT NULL,
    updated_at DATETIME NOT NULL,
    refit_owner VARCHAR(64),
    refit_seen_at FLOAT,
    CONSTRAINT pk_monitors PRIMARY KEY (backbone_id),
    CONSTRAINT fk_monitors_backbone_id FOREIGN KEY(backbone_id) REFERENCES backbones (id)
)

CREATE TABLE monitor_events (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    backbone_id INTEGER NOT NULL,
    kind VARCHAR(32) NOT NULL,
    document JSON NOT NULL,
    created_at DATETIME NOT NULL,
    claimed_at FLOAT,
    delivered_at FLOAT,
    CONSTRAINT fk_monitor_events_backbone_id FOREIGN KEY(backbone_id) REFERENCES backbones (id)
)

CREATE INDEX ix_monitor_events_backbone_id_id ON monitor_events (backbone_id, id)

CREATE TABLE api_keys (
    id VARCHAR(16) NOT NULL,
    name VARCHAR(128) NOT NULL,
    salt BLOB NOT NULL,
    digest BLOB NOT NULL,
    scopes JSON NOT NULL,
    per_minute INTEGER,
    concurrency INTEGER,
    created_at DATETIME NOT NULL,
    expires_at DATETIME,
    revoked_at DATETIME,
    last_used_at DATETIME,
    CONSTRAINT pk_api_keys PRIMARY KEY (id)
)

CREATE TABLE audit (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at DATETIME NOT NULL,
    action VARCHAR(32) NOT NULL,
    subject VARCHAR(256) NOT NULL,
    actor VARCHAR(128) NOT NULL,
    key_id VARCHAR(16),
    address VARCHAR(64) NOT NULL,
    details JSON NOT NULL
)

CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END

CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END

CREATE TABLE feedback_blocks (
    backbone_id INTEGER NOT NULL,
    id VARCHAR(24) NOT NULL,
    seq BIGINT NOT NULL,
    row_count INTEGER NOT NULL,
    versions BLOB NOT NULL,
    moments BLOB NOT NULL,
    logits BLOB NOT NULL,
    CONSTRAINT pk_feedback_blocks PRIMARY KEY (backbone_id, id),
    CONSTRAINT fk_feedback_blocks_backbone_id FOREIGN KEY(backbone_id) REFERENCES backbones (id)
)

CREATE INDEX ix_feedback_blocks_backbone_id_seq ON feedback_blocks (backbone_id, seq)

INSERT INTO alembic_version VALUES ('0011')

INSERT INTO calibrators (version, method, created_at) VALUES (0, 'uncalibrated', '1970-01-01 00:00:00.000000')
